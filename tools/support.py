"""Write the tables of docs/support.md: `python tools/support.py`; `--check`: are they what the program does?

Each cell is a training of a few steps on the CPU, with this strategy and this feature, on two ranks (on one rank for a
strategy of a single process). "yes": the training ended. A number is its exit code, and the note below the table has
its message. The second table comes from the checks of the settings alone: such a training needs a GPU, a compiler or a
second node. This takes a minute on a quiet machine. `--check zero` looks at the sessions of one strategy only.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.cli import train as command
from paceline.cli.train import check_training
from paceline.config.settings import TrainConfig, check_values
from paceline.config.strategies import STRATEGY_INFO
from paceline.errors import ExitCode, PacelineError, ReportedByPeer
from paceline.rank.imports import TRAINING_MODULES, import_without_gc

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
TASK, NORMALISED, STREAMED = (f"{ROOT}/{path}" for path in (
    "examples/own_transformer.py:task", "tools/support.py:normalised", "tools/support.py:streamed"))  # fmt: skip
PLAIN = f"{ROOT}/tools/support.py:plain"
WIDTH, SAMPLES, PATIENCE_SECONDS = 8, 64, 60
BEGIN, END, SEVERAL = "<!-- support -->\n", "<!-- end -->", "several processes"
Found = tuple[int, str]
"""an exit code, and the message of the error"""

# ---- paceline train: options on the command line -----------------------------------------------------------------

TRAINED = {
    SEVERAL: "",
    "several micro-batches a step": "--accumulation 2",
    "more virtual ranks than processes": "--virtual-ranks 4",
    "bf16": "--precision bf16",
    "fp16 with loss scaling": "--precision fp16",
    "gradient clipping": "--clip-norm 1",
    "average of the weights (EMA)": "--ema 0.99",
    "activation checkpointing": "--checkpoint-activations layers.*",
    "batch norm, local statistics": f"{NORMALISED} --batchnorm local",
    "batch norm, synchronised": f"{NORMALISED} --batchnorm sync",
    "streaming dataset": f"{STREAMED} --steps 2",
    "tensor parallelism": f"{PLAIN} --mesh tensor=2",
    "pipeline parallelism": "--mesh pipeline=2",
    "context parallelism": "--mesh context=2",
    "sharding as a mesh axis": "--mesh shard=2",
    "skip steps with NaN": "--not-finite skip",
    "audits by a second rank": "--audit-every 1",
    "compressed gradients between nodes": "--compress bf16",
    "local steps (DiLoCo)": "--local-steps 2",
}
CHECKED = {
    "`torch.compile`": "--compile",
    "CUDA graphs": "--cuda-graphs",
    "TF32": "--precision tf32",
    "several nodes": "--on ssh --hosts n1,n2",
    "`--nodes MIN:MAX`": "--on ssh --hosts n1,n2 --nodes 1:2 --checkpoint-every 10",
    "`--nodes MIN:MAX` with a mesh": "--on ssh --hosts n1,n2 --nodes 1:2 --checkpoint-every 10 --mesh data=2",
    "`--min-nproc`": "--min-nproc 1 --max-restarts 1",
}


class Normalised(nn.Module):
    """(B, WIDTH) -> (B, 1), in two blocks with batch norm, or with another second layer."""

    def __init__(self, second: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), second(WIDTH)) for _ in range(2)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.head(self.layers(x))


def dataset(split: str = "train") -> TensorDataset:
    """Pairs of (WIDTH,) and (1,)."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1] * x[:, 1:2])


class Stream(IterableDataset[Any]):
    """The samples of `dataset`, without a length."""

    def __iter__(self) -> Iterator[Any]:
        data = dataset()
        return (data[i] for i in range(len(data)))


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """(B, 1) -> (B,)."""
    return F.mse_loss(outputs, targets, reduction="none")[:, 0]


normalised = paceline.Task(Normalised, dataset, losses)
plain = paceline.Task(lambda: Normalised(lambda width: nn.Linear(width, width)), dataset, losses)
streamed = paceline.Task(Normalised, lambda split: Stream() if split == "train" else dataset(), losses)  # pyright: ignore


def words_of(options: str, nproc: int) -> list[str]:
    """What is typed behind `paceline train`."""
    task = [] if options.startswith(str(ROOT)) else [TASK]
    return [*task, *options.split(), "--nproc", str(nproc), "--batch-size", "8"]


def train(strategy: str, options: str, size: int) -> None:
    """Two steps of a task on this rank, with the checks that the launcher makes before."""
    from paceline.train.run import train

    with tempfile.TemporaryDirectory() as folder:
        words = [*words_of(options, size), "--strategy", strategy, "--device", "cpu", "--run-dir", f"{folder}/run"]
        config = command.parse(words if "--steps" in words else [*words, "--steps", "2"])
        check_values(config)
        check_training(config, size, size)
        train(config)


def ranks_of(strategy: str, title: str, options: str = "") -> int:
    """On how many ranks a cell is trained."""
    return 2 if title == SEVERAL or "mesh" in options or not STRATEGY_INFO[strategy].single_process else 1


@cache
def parsed(options: str, nproc: int) -> TrainConfig:
    """The configuration without a strategy, which is not checked: parsing takes long."""
    with mock.patch.object(command, "check_values"):
        return command.parse([*words_of(options, nproc), "--dry-run"])


def checked(strategy: str, title: str) -> Found:
    """The exit code of `paceline train --dry-run`, and its error."""
    options = {**TRAINED, **CHECKED}[title]
    config = replace(parsed(options, ranks_of(strategy, title, options)), strategy=strategy)
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(command, "parse", return_value=config):
        try:
            check_values(config)
            return int(command.main([])), ""
        except PacelineError as error:
            return int(error.exit_code), message(str(error), strategy)


# ---- sessions: what a loop does ----------------------------------------------------------------------------------


def loop(
    strategy: str,
    *,
    model: Callable[[], nn.Module] = Normalised,
    data: Callable[[], Any] = dataset,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.01),
    settings: dict[str, Any] | None = None,
    loading: dict[str, Any] | None = None,
    before: Callable[[Any, nn.Module], None] = lambda s, model: None,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda model, x, y: F.mse_loss(model(x), y),
    body: Callable[[Any, nn.Module], None] = lambda s, model: None,
) -> None:
    """An epoch of a loop in a session; each argument is one part of it."""
    torch.manual_seed(0)
    with paceline.session(strategy=strategy, device="cpu", **(settings or {})) as s:
        net = model()
        before(s, net)
        net, stepping = s.prepare(net, optimizer)
        loader = s.loader(data(), **{"global_batch": 16, **(loading or {})})
        for _ in s.epochs(1):
            for x, y in loader:
                stepping.zero_grad()
                s.backward(loss(net, x, y))
                body(s, net)
                stepping.step()


def clip(s: Any, model: nn.Module) -> None:
    """As torch's users clip."""
    if s.last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def average(s: Any, model: nn.Module) -> None:
    """An average of the weights, as torch has it."""
    if s.last and not hasattr(s, "average"):
        s.average = AveragedModel(model)


def frozen() -> nn.Module:
    """A model of which only the head is trained."""
    model = Normalised()
    model.layers.requires_grad_(False)
    return model


def sparse() -> nn.Module:
    """A model with sparse gradients."""
    return nn.Sequential(nn.Embedding(SAMPLES, WIDTH, sparse=True), nn.Linear(WIDTH, 1))


def hooked(s: Any, model: nn.Module) -> None:
    """A hook on the gradient of a parameter."""
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss with a gradient penalty."""
    x = x.requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return F.mse_loss(outputs, y) + gradient.square().sum(1).mean()


def numbered() -> TensorDataset:
    """Pairs of a number and (1,)."""
    return TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(1)))


def two_optimizers(strategy: str) -> None:
    """Muon for the matrices of a model, AdamW for the rest."""
    torch.manual_seed(0)
    with paceline.session(strategy=strategy, device="cpu") as s:
        net = Normalised()
        matrices, rest = ([p for p in net.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
        net, (one, other) = s.prepare(net, [torch.optim.Muon(matrices), torch.optim.AdamW(rest)])
        loader = s.loader(dataset(), global_batch=16)
        for _ in s.epochs(1):
            for x, y in loader:
                one.zero_grad()
                other.zero_grad()
                s.backward(F.mse_loss(net(x), y))
                one.step()
                other.step()


def compiled() -> nn.Module:
    """A model that torch.compile wraps, without a compiler."""
    return torch.compile(Normalised(), backend="eager")  # pyright: ignore[reportReturnType]


class Recomputed(Normalised):
    """A model whose layers are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.head(checkpoint(self.layers, x, use_reentrant=False))


def scheduled(strategy: str) -> None:
    """A scheduler, which the loop steps after each epoch."""
    torch.manual_seed(0)
    with paceline.session(strategy=strategy, device="cpu") as s:
        net = Normalised()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        net, optimizer, scheduler = s.prepare(net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
        loader = s.loader(dataset(), global_batch=16)
        for _ in s.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                s.backward(F.mse_loss(net(x), y))
                optimizer.step()
            scheduler.step()


def autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """`torch.autocast` in the body of the loop."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.mse_loss(model(x), y)


def matrices(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that looks at whole matrices."""
    return torch.optim.Adafactor(parameters)


LOOPS: dict[str, Callable[[str], None]] = {
    SEVERAL: loop,
    "several micro-batches a step": lambda name: loop(name, loading={"accumulation": 2}),
    "more virtual ranks than processes": lambda name: loop(name, settings={"virtual_ranks": 4}),
    '`precision="bf16"`': lambda name: loop(name, settings={"precision": "bf16"}),
    '`precision="fp16"`': lambda name: loop(name, settings={"precision": "fp16"}),
    "`torch.autocast` in the body": lambda name: loop(name, loss=autocast),
    "`clip_grad_norm_` of torch": lambda name: loop(name, body=clip),
    "`s.clip_grad_norm`": lambda name: loop(name, body=lambda s, model: s.last and s.clip_grad_norm(1.0)),
    "`AveragedModel` of torch (EMA)": lambda name: loop(name, body=average),
    "frozen layers (LoRA)": lambda name: loop(name, model=frozen),
    "two optimizers of one model (Muon and AdamW)": two_optimizers,
    "optimizer of whole matrices (Adafactor)": lambda name: loop(name, optimizer=matrices),
    "gradient penalty": lambda name: loop(name, loss=penalty),
    "hook on a parameter": lambda name: loop(name, before=hooked),
    "sparse gradients": lambda name: loop(name, model=sparse, data=numbered),
    "batch norm, local statistics": loop,
    "`torch.compile` of the model": lambda name: loop(name, model=compiled),
    "activation checkpointing of torch": lambda name: loop(name, model=Recomputed),
    "scheduler of torch": scheduled,
    "streaming dataset": lambda name: loop(name, data=Stream),
    "skip steps with NaN": lambda name: loop(name, settings={"not_finite": "skip"}),
    "audits by a second rank": lambda name: loop(name, settings={"audit_every": 1}),
}


# ---- run them ----------------------------------------------------------------------------------------------------


def tried(call: Callable[[], None], size: int) -> Found:
    """The exit code of `call` on `size` ranks, and the message of its error. The ranks are forks of this process."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ranks = [_fork(call, rank, size, port, Path(folder)) for rank in range(size)]
        for pid in ranks:
            os.waitpid(pid, 0)
        found = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).iterdir())]
    if len(found) < size:
        return 1, "a rank died"
    return next((one for one in found if one[1]), found[0])


def _fork(call: Callable[[], None], rank: int, size: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    signal.alarm(PATIENCE_SECONDS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: Found = 0, ""
    try:
        call()
    except ReportedByPeer as error:
        found = int(error.exit_code), ""
    except PacelineError as error:
        found = int(error.exit_code), str(error)
    except BaseException as error:
        found = int(ExitCode.FAILED), f"{type(error).__name__}: {error}"
    (folder / str(rank)).write_bytes(pickle.dumps(found))
    os._exit(0)


def message(words: str, strategy: str) -> str:
    """An error as the page has it: its first line, without the line of the script and the strategy's name."""
    first = re.sub(r"^\S+\.py:\d+: ", "", words.split("\n")[0])
    return re.sub(rf"(strategy '?){strategy}\b", r"\1NAME", first).replace(f"{ROOT}/", "")


def cell(kind: str, title: str, strategy: str) -> Found:
    """One cell of a table."""
    if kind == "check":
        return checked(strategy, title)
    options = TRAINED[title] if kind == "task" else ""
    size = ranks_of(strategy, title, options)
    call = partial(train, strategy, options, size) if kind == "task" else partial(LOOPS[title], strategy)
    code, words = tried(call, size)
    return code, message(words, strategy)


def table(kind: str) -> str:
    """A row for each title, a column for each strategy; then the messages."""
    notes = dict[str, int]()
    text = f"\n## {TABLES[kind][0]}\n\n| feature | {' | '.join(f'`{name}`' for name in STRATEGY_INFO)} |\n"
    text += f"| {' | '.join(['---'] * (len(STRATEGY_INFO) + 1))} |\n"
    for title in TABLES[kind][1]:
        marks = list[str]()
        for name in STRATEGY_INFO:
            code, words = cell(kind, title, name)
            marks.append(f"{code} [{notes.setdefault(words, len(notes) + 1)}]" if code else "yes")
        text += f"| {title} | {' | '.join(marks)} |\n"
    return text + "\n" + "".join(f"{number}. {words}\n" for words, number in notes.items())


TABLES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "task": ("`paceline train`", TRAINED),
    "check": ("`paceline train`, checks of settings only", CHECKED),
    "loop": ("Sessions", LOOPS),
}


def told(page: str, kind: str) -> dict[tuple[str, str], Found]:
    """The cells of a table as `page` has them: the reverse of `table`."""
    (text,) = re.findall(rf"^## {re.escape(TABLES[kind][0])}\n(.*?)(?=^## |^{END})", page, re.MULTILINE | re.DOTALL)
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    names = [name.strip("`") for name in rows[0][1:]]
    found = dict[tuple[str, str], Found]()
    for title, *marks in (row for row in rows[1:] if row[0] != "---"):
        for name, mark in zip(names, marks, strict=True):
            code, _, note = mark.rstrip("]").partition(" [")
            found[title, name] = (0, "") if code == "yes" else (int(code), notes[note])
    return found


def imported() -> None:
    """All that ranks need, once."""
    import_without_gc([*TRAINING_MODULES, "paceline.sessions", "paceline.strategies.fsdp", "paceline.strategies.ddp"])


def main(words: list[str]) -> int:
    """1 if --check finds other tables; `--check zero exact`: in the columns of these in the table of sessions."""
    imported()
    page = PAGE.read_text()
    if "--check" in words and (names := [word for word in words if word in STRATEGY_INFO]):
        wrong = {at: found for at, found in told(page, "loop").items()
                 if at[1] in names and found != cell("loop", *at)}  # fmt: skip
        print(*(f"{at}: the page says {found}: python tools/support.py" for at, found in wrong.items()), sep="\n")
        return int(bool(wrong))
    tables = "".join(map(table, TABLES))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    now = before + BEGIN + tables + "\n" + END + rest.partition(END)[2]
    if "--check" not in words:
        PAGE.write_text(now)
    elif now != page:
        print("docs/support.md does not say what the program does: python tools/support.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
