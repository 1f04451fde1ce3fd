"""A loop in a session."""

import torch
from parts import error, finish, network, reach, samples

import paceline


def main():
    data = samples()
    with paceline.session("out", resume=True) as s:
        model, optimizer, scheduler = s.prepare(
            network(dropout=0.1),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9),
        )
        loader = s.loader(data, batch_size=4, accumulation=2)
        for _ in s.epochs(3):
            for x, y in loader:
                s.backward(error(model, x, y))
                reach("accumulate")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                reach("step")
            reach("evaluate")
            model.eval()
            with torch.no_grad():
                for x, y in s.loader(data, global_batch=32):
                    error(model, x, y)
            model.train()
            reach("save")
    finish(model)


if __name__ == "__main__":
    main()
