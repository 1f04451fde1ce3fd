"""Lightning's Trainer, right in the way that is named: with_lightning.py KIND --folder FOLDER."""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset
from torchmetrics.classification import BinaryAccuracy

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def rows(count, *, seed=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def trainer(**options):
    usual = {"accelerator": "cpu", "devices": WORLD, "strategy": "ddp", "max_epochs": 3, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(**(usual | quiet | options))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(16, 2)
        self.accuracy = BinaryAccuracy()

    def forward(self, x):
        return self.head(self.trunk(x))

    def training_step(self, batch, _):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.accuracy(self(batch[0]).argmax(1), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def windows():
    """Windows that divide the epoch, clipping, a rate that goes on with each of the optimizer's steps."""

    class Scheduled(Model):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    loader = DataLoader(rows(192 * WORLD), 8, shuffle=True)
    trainer(accumulate_grad_batches=4, gradient_clip_val=0.5).fit(Scheduled(), loader)


def stopped():
    """Validation in the middle of epochs, in shares without padding, by a metric; the best is kept; bfloat16."""
    data, held_out = rows(400), rows(61, seed=1)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, WORLD, RANK))
    val_loader = DataLoader(Subset(held_out, range(RANK, len(held_out), WORLD)), 8)
    best = ModelCheckpoint(args.folder, monitor="accuracy", mode="max")
    callbacks = [EarlyStopping("accuracy", mode="max", patience=2), best]
    options = {"use_distributed_sampler": False, "val_check_interval": 0.5, "precision": "bf16-mixed"}
    trainer(callbacks=callbacks, enable_checkpointing=True, **options).fit(Model(), loader, val_loader)


def resumed():
    """A training that goes on from the checkpoint of another Trainer."""
    loader, path = DataLoader(rows(400), 8, shuffle=True), args.folder / "middle.ckpt"
    first = trainer(max_steps=10)
    first.fit(Model(), loader)
    first.save_checkpoint(path)
    trainer(max_epochs=2).fit(Model(), loader, ckpt_path=path)


class Deep(Model):
    def __init__(self):
        super().__init__()
        self.trunk.requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x):
        return self.head(checkpoint(self.block, self.trunk(x), use_reentrant=False))

    def configure_optimizers(self):
        groups = [{"params": self.block.parameters(), "lr": 1e-3}, {"params": self.head.parameters()}]
        optimizer = torch.optim.AdamW(groups, 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def averaged():
    """A frozen trunk, two rates, a schedule of epochs, and a moving average that is validated."""
    loaders = DataLoader(rows(400), 8, shuffle=True), DataLoader(rows(64, seed=1), 8)
    trainer(callbacks=[EMAWeightAveraging(decay=0.9)]).fit(Deep(), *loaders)


class Adversarial(lightning.LightningModule):
    """Two optimizers that step in turn, by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, _):
        maker, judge = self.optimizers()
        made = self.maker(torch.randn(len(batch[0]), 4))
        self.toggle_optimizer(judge)
        seen = torch.cat([self.judge(batch[0]), self.judge(made.detach())])
        truth = torch.cat([torch.ones(len(made), 1), torch.zeros(len(made), 1)])
        self.manual_backward(binary_cross_entropy_with_logits(seen, truth))
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.toggle_optimizer(maker)
        self.manual_backward(binary_cross_entropy_with_logits(self.judge(made), torch.ones(len(made), 1)))
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)

    def configure_optimizers(self):
        return torch.optim.Adam(self.maker.parameters(), 1e-3), torch.optim.Adam(self.judge.parameters(), 1e-3)


def by_hand():
    """Two optimizers that step in turn; each rank draws noise of its own."""
    torch.manual_seed(1 + RANK)
    loader = DataLoader(rows(400), 8, shuffle=True)
    trainer(strategy="ddp_find_unused_parameters_true", max_epochs=2).fit(Adversarial(), loader)


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for number in range(1000):
            x = torch.randn(6, generator=generator)
            if number % WORLD == RANK:
                yield x, (x[0] > 0).long()


def streamed():
    """A stream of which each rank takes its share, from a data module; clipping before a step of the script's own."""

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Stream(), 8)

    class Clipped(Model):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1, (self.trainer.global_step + 1) / 10)
            optimizer.step(closure=optimizer_closure)

    trainer(limit_train_batches=20, accumulate_grad_batches=2).fit(Clipped(), datamodule=Data())


KINDS = (windows, stopped, resumed, averaged, by_hand, streamed)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--folder", type=Path, default=Path("."))
    args = parser.parse_args()
    lightning.seed_everything(1, verbose=False)
    {kind.__name__: kind for kind in KINDS}[args.kind]()
