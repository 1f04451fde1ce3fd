"""Lightning's Trainer."""

import os
import time

import lightning as L
import torch
from parts import FOR_EVER_SECONDS, STEPS, error, hangs, network, samples
from torch.utils.data import DataLoader, default_collate


def collate(rows):
    if hangs("collate"):
        time.sleep(FOR_EVER_SECONDS)  # FAULT collate
    return default_collate(rows)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def training_step(self, batch, number):
        if hangs("step"):
            time.sleep(FOR_EVER_SECONDS)  # FAULT step
        loss = error(self.inner, *batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Said(L.Callback):
    def on_train_batch_end(self, *args):
        if hangs("callback"):
            time.sleep(FOR_EVER_SECONDS)  # FAULT callback


def main():
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_steps=STEPS, logger=False,
        callbacks=[Said()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(samples(), batch_size=4, collate_fn=collate))


if __name__ == "__main__":
    main()
