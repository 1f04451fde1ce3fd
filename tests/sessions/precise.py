"""A loop in a precision: `precise.py KIND PRECISION [STRATEGY]`. Writes its losses and weights, in `KIND.json`."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.train import compute_settings

KIND, PRECISION, STRATEGY = (*sys.argv[1:], "bucketed")[:3]
OVERFLOWS, ENDS = 3, 5  # steps
SCALER = torch.amp.GradScaler("cpu", enabled=KIND == "scaler")  # found by the session because it exists
if PRECISION == "auto":  # some processors have bf16
    compute_settings.bf16_unsupported_reason = lambda device: f"a {device.type} has none"


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 16)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), TensorDataset(inputs, inputs[:, :1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def write(losses: list[float], model: nn.Module, **more: Any) -> None:
    values = torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    found = {"losses": losses, "digest": digest, "weights": values.tolist(), **more}
    Path(f"{KIND}.json").write_text(json.dumps(found))


def plain() -> None:
    """One process, in order, under autocast where PRECISION says so."""
    model, data = model_and_data()
    optimizer, losses = sgd(model.parameters()), list[float]()
    for x, y in zip(*(tensor.split(16) for tensor in data.tensors), strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "bf16"):
            outputs = model(x)
        loss = F.mse_loss(outputs.float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    write(losses, model)


def session() -> None:
    model, data = model_and_data()
    virtual_ranks = 2 if STRATEGY == "exact" else None
    with paceline.session(precision=PRECISION, strategy=STRATEGY, virtual_ranks=virtual_ranks) as s:
        model, optimizer = s.prepare(model, sgd)
        losses = list[float]()
        for x, y in s.loader(data, global_batch=16, shuffle=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            s.backward(loss)
            optimizer.step()
            losses.append(s.mean(loss.item() * s.samples, s.samples))
        weights = s.weights()
        types = sorted({str(parameter.dtype) for parameter in weights.values()})
        if s.rank == 0:
            model = model_and_data()[0]
            model.load_state_dict(weights)
            write(losses, model, types=types)


def scaled() -> None:
    """Losses so small that gradients in fp16 are zeros without a scale, and one that overflows with it."""
    model, data = model_and_data()
    with paceline.session("run", resume=True, precision=PRECISION, checkpoint_every=1, seed=0) as s:
        model, optimizer = s.prepare(model, lambda parameters: torch.optim.SGD(parameters, 1e4))
        loader, moved = s.loader(data, global_batch=16), list[bool]()
        for _ in s.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                before = [parameter.detach().clone() for parameter in model.parameters()]
                s.backward(F.mse_loss(model(x), y) * (1e6 if s.step == OVERFLOWS else 1e-6))
                optimizer.step()
                if s.last:
                    moved.append(not all(map(torch.equal, before, model.parameters())))
                if s.step == ENDS and Path("stop").exists():
                    Path("stop").unlink()
                    raise RuntimeError("as planned")
        if s.rank == 0:
            write([], model, moved=moved)


{"plain": plain, "session": session, "scaled": scaled, "scaler": session}[KIND]()
