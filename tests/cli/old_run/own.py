"""The loop of the run folder `own`: `resume` is False in the run that wrote it."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

with paceline.session(sys.argv[1], resume=len(sys.argv) > 2, checkpoint_every=3) as s:
    model, optimizer = s.prepare(nn.Linear(3, 1), lambda parameters: torch.optim.AdamW(parameters))
    loader = s.loader(TensorDataset(torch.arange(66.0).reshape(22, 3) / 66), global_batch=4)
    for _ in s.epochs(2):
        for (inputs,) in loader:
            optimizer.zero_grad()
            s.backward(model(inputs).square().mean())
            optimizer.step()
