"""Adapters of peft in sessions, right and wrong. Writes codes of errors, and facts, to found.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PacelineError, ReportedByPeer

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
found: dict[str, Any] = {}


class Net(nn.Module):
    def __init__(self, seed: int = 0, *, norm: bool = False) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def lora(net: nn.Module, **options: Any) -> Any:
    return get_peft_model(net, LoraConfig(r=2, target_modules=["first"], **options))  # pyright: ignore


def error(act: Callable[[], Any]) -> list[str]:
    """The code of the error that `act` raises on this rank, and its names; empty if another rank reports it."""
    try:
        act()
    except ReportedByPeer:
        return []
    except PacelineError as reported:
        return [reported.code, str(reported.fields.get("names", ""))]
    return ["no error"]


def trained(net: nn.Module, folder: str | None = None, **options: Any) -> tuple[paceline.Session, nn.Module]:
    s = paceline.session(folder, resume=folder is not None, seed=0, **options)
    model, optimizer = s.prepare(net, torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1))
    for _ in s.epochs(1):
        for x, y in s.loader(TensorDataset(X, Y), global_batch=8):
            optimizer.zero_grad()
            s.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    return s, model


def expect_error(name: str, net: nn.Module) -> None:
    s, model = trained(net)
    found[name] = error(lambda: s.save(model, name, adapter=True))
    s.close()


def main() -> None:
    expect_error("no adapter", Net())
    outside = lora(Net())
    outside.base_model.model.second.requires_grad_(True)
    expect_error("trained outside", outside)
    expect_error("statistics", lora(Net(norm=True)))
    whole = AdaLoraConfig(total_step=10, target_modules=["first"])
    found["adalora"] = error(lambda: trained(get_peft_model(Net(), whole), strategy="fsdp"))  # pyright: ignore
    for session in [*paceline.sessions.lifecycle.open_sessions]:  # pyright: ignore
        session.close()
    named = LoraConfig(r=2, target_modules=["first"])
    s, model = trained(get_peft_model(Net(), named, adapter_name="base_model"))  # pyright: ignore
    s.save(model, "named", adapter=True)
    s.close()
    s, model = trained(lora(Net(), modules_to_save=["second"]), "run", strategy="fsdp")
    s.save(model, "saved", adapter=True)
    weights = s.weights(model)
    s.close()
    if s.rank == 0:
        torch.save(weights, "weights.pt")
        loaded = paceline.load_adapter(Net(), "saved").eval()
        again = lora(Net(), modules_to_save=["second"]).eval()
        again.load_state_dict(weights)
        found["same outputs"] = torch.equal(loaded(X), again(X))
        found["another base"] = error(lambda: paceline.load_adapter(Net(seed=1), "saved"))
        other = {"adapter_name": "base_model"}
        found["another base, named"] = error(lambda: paceline.load_adapter(Net(seed=1), "named/base_model", **other))
        found["another dtype"] = error(lambda: paceline.load_adapter(Net().double(), "saved"))
        Path("found.json").write_text(json.dumps(found))
    s, _ = trained(lora(Net(seed=1), modules_to_save=["second"]), "run", strategy="fsdp")  # the run is over: a note
    s.close()


if __name__ == "__main__":
    main()
