"""Lightning's Trainer, with everything right; `--plant NAME` as in plain.py. All is that of the line of `fit`."""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
plant = parser.parse_args().plant


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _, dataloader_idx=0):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def rows(count):
    x = torch.randn(count, 8)
    return TensorDataset(x, (x[:, 0] > 0).long())


torch.set_num_threads(1)
lightning.seed_everything(1)
world = int(os.environ["WORLD_SIZE"])
held_out = [rows(32 * world), rows(32 * world - 1 if plant == "padded score" else 64 * world)]
trainer = lightning.Trainer(
    accelerator="cpu", devices=world, strategy="ddp", max_epochs=3, accumulate_grad_batches=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=plant != "same batches",
)  # fmt: skip
loader = DataLoader(rows(104 * world if plant == "last window divided" else 96 * world), 8, shuffle=True)
if plant == "same batches":
    loader = DataLoader(rows(192), 8, shuffle=True)  # plant: same batches
trainer.fit(Model(), loader, [DataLoader(one, 16) for one in held_out])  # plant: last window divided, padded score
