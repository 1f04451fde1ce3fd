"""A small classifier, by Lightning's Trainer.

python examples/from/lightning_before.py
"""

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        outputs = self.net(x)
        self.log("loss", F.cross_entropy(outputs, y), sync_dist=True)
        self.log("accuracy", (outputs.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def data(seed, count):
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main():
    lightning.seed_everything(1)
    train, validation = (DataLoader(data(seed, 500), batch_size=50, shuffle=seed == 1) for seed in (1, 2))
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=6, accumulate_grad_batches=2, gradient_clip_val=1.0, default_root_dir="runs/lightning",
        callbacks=[EarlyStopping("loss", patience=2), ModelCheckpoint(monitor="loss")],
    )  # fmt: skip
    trainer.fit(model, train, validation)


if __name__ == "__main__":
    main()
