"""A loop with Accelerate, which saves and loads its state."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from parts import error, finish, network, reach, samples
from torch.utils.data import DataLoader


class Progress:
    epoch = batch = 0

    def state_dict(self):
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]


def save(accelerator, progress):
    reach("save")
    accelerator.save_state(f"out/state-{progress.epoch}-{progress.batch}")


def main():
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # otherwise each resume begins with the first order
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)
    model, data, progress = network(dropout=0.0), samples(), Progress()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(progress)
    whole = [path for path in Path("out").glob("state-*") if (path / "random_states_1.pkl").exists()]
    if whole:
        accelerator.load_state(max(whole, key=lambda path: [int(n) for n in path.name.split("-")[1:]]))
    while progress.epoch < 3:
        loader.set_epoch(progress.epoch)
        rest = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for x, y in rest:
            with accelerator.accumulate(model):
                accelerator.backward(error(model, x, y))
                optimizer.step()
                optimizer.zero_grad()
            progress.batch += 1
            reach("step" if accelerator.sync_gradients else "accumulate")
            if progress.batch % 4 == 0:
                save(accelerator, progress)
        progress.epoch, progress.batch = progress.epoch + 1, 0
        reach("evaluate")
        error(model.eval(), *data.tensors)
        model.train()
    finish(accelerator.unwrap_model(model))


if __name__ == "__main__":
    main()
