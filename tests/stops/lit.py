"""Lightning's Trainer, as it is."""

import os
import sys

import lightning as L
import torch
from parts import error, finish, network, reach, samples
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = network(dropout=0.1)

    def training_step(self, batch, number):
        return error(self.inner, *batch)

    def validation_step(self, batch, number):
        self.log("error", error(self.inner, *batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, number):
        reach("step" if number % 2 else "accumulate")

    def on_validation_start(self):
        if not self.trainer.sanity_checking:  # before the first step
            reach("evaluate")

    def on_save_checkpoint(self, checkpoint):
        reach("save")


def main():
    data, module = samples(), Module()
    for _ in range(1 + ("twice" in sys.argv)):  # the second training saves in the same folder
        trainer = L.Trainer(
            accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=3, logger=False,
            val_check_interval=6, accumulate_grad_batches=2, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir="out",
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=32))
    finish(module)


if __name__ == "__main__":
    main()
