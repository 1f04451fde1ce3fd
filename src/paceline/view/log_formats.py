"""What one line of a training's log says, whatever printed it: a table of the formats that are common (no torch here).

`read_line` is pure. A line may begin with a rank (srun --label, torchrun --tee, our own prefix) and a time.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

NUMBER = r"(?:tensor\()?([-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|\.[0-9]+|nan|inf(?:inity)?)(?![\w.]))"
MOST_CHARS = 2000  # of a line: what is looked at

PREFIXES = (
    re.compile(r"\[default([0-9]+)\]:"),  # torchrun --tee
    re.compile(r"\[rank ?([0-9]+)\]:? ?", re.IGNORECASE),  # `paceline launch`, and torch's own errors
    re.compile(r"\[([0-9][0-9,-]*)\] "),  # `paceline logs`
    re.compile(r"\s*([0-9]{1,5}): "),  # srun --label, mpirun's too
    re.compile(r"rank ?([0-9]+) ?[:|,] ?", re.IGNORECASE),
)
TIMES = (
    re.compile(r"\[?([0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,6})?)Z?\]?"),
    re.compile(r"\[?([0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,6})?)\]?(?= )"),
)


@dataclass(frozen=True)
class Format:
    """A kind of line: what it is called, an example, how it is known, and what its groups are the values of."""

    name: str
    example: str
    pattern: re.Pattern[str]
    held_out: bool = False  # its loss and accuracy are of data that is not trained on


FORMATS = (
    Format(
        "classic", "Train Epoch: 3 [2560/60000 (4%)]\tLoss: 0.12",
        re.compile(r"Train(?:ing)? Epoch:?\s*(?P<epoch>[0-9]+)\s*\[\s*(?P<done>[0-9]+)/(?P<total>[0-9]+)", re.I),
    ),
    Format(
        "test set", "Test set: Average loss: 0.03, Accuracy: 9876/10000 (99%)",
        re.compile(
            r"(?:Test|Validation|Eval\w*)(?: set)?:?.{0,80}?Accuracy:?\s*(?P<right>[0-9]+)\s*/\s*(?P<of>[0-9]+)",
            re.IGNORECASE,
        ),
        held_out=True,
    ),
    Format(
        "Hugging Face Trainer", "{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 1.2}",
        re.compile(r"\{'(?:loss|eval_\w+|train_\w+)': "),
    ),
    Format(
        "progress bar", "Epoch 3: 40%|####      | 40/100 [00:04<00:06, 9.52it/s, loss=0.12]",
        re.compile(
            r"[0-9]{1,3}%\|[^|]*\|\s*(?P<step>[0-9]+)/(?P<steps>[0-9]+)\s*\[(?P<elapsed>[0-9:]+)<[0-9:?]+"
            r"(?:,\s*(?P<rate>[0-9.]+)(?P<unit>it/s|s/it|batch(?:es)?/s|steps?/s|s/batch))?"
        ),
    ),
)  # fmt: skip
VALUES = Format("key and value", "epoch=3 step=40 loss=0.12, or: loss: 0.12", re.compile(""))
KEYS = {
    "loss": "train[_ /]?loss|training[_ ]loss|loss/train|loss",
    "held_out_loss": "(?:val|valid|validation|eval|test)(?:[_ /]loss)|average loss",
    "accuracy": "(?:train|training)[_ /](?:accuracy|acc)|accuracy|acc",
    "held_out_accuracy": "(?:val|valid|validation|eval|test)(?:[_ /](?:accuracy|acc))",
    "epoch": "epoch",
    "step": "global[_ ]step|step|iteration|iter|batch",
    "rate": "(?:train[_ ])?samples[_ ]per[_ ]second|throughput|samples/s(?:ec)?|images/s(?:ec)?|examples/s(?:ec)?",
}
NAMES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in KEYS.items()}
KEY = re.compile(
    rf"(?<![\w/.-])['\"]?({'|'.join(f'(?:{pattern})' for pattern in reversed(KEYS.values()))})['\"]?"
    rf"(?:\s*[=:]\s*|\s+)\[?'?{NUMBER}'?(?:\s*/\s*([0-9]+))?",
    re.IGNORECASE,
)
SPEED = re.compile(
    NUMBER.replace(r"(?![\w.])", "") + r"\s*(samples|images|imgs?|examples)\s*(?:/|per )\s*s", re.IGNORECASE
)

TROUBLES = (
    ("out of memory", re.compile(r"CUDA out of memory|OutOfMemoryError|oom[-_]kill|Out of memory|"
                                 r"DefaultCPUAllocator: can")),
    ("communication", re.compile(r"NCCL (?:error|WARN)|nccl\w*Error|Watchdog caught collective|DistBackendError|"
                                 r"DistNetworkError|gloo/\S+\.cc.*\]|Connection (?:closed|reset) by peer")),
    ("killed", re.compile(r"Signal [0-9]+ \(SIG\w+\) received|exitcode\s*: -[0-9]+|srun: error: |slurmstepd: error: |"
                          r"ChildFailedError|DUE TO TIME LIMIT|^Killed$|Segmentation fault")),
    ("restart", re.compile(r"^---- generation [0-9]+ ----$|[Rr]estart(?:ing|ed) (?:worker|the worker|all)")),
    ("traceback", re.compile(r"Traceback \(most recent call last\)")),
)  # fmt: skip
OF_USE = ("loss", "acc", "epoch", "%|", "samples", "images", "img", "examples", "throughput")  # one is in each format
OF_TROUBLE = ("memory", "oom", "nccl", "watchdog", "error", "gloo", "connection", "signal", "exitcode", "time limit",
              "killed", "fault", "restart", "generation", "traceback")  # fmt: skip
MAY_BEGIN = "[0123456789 rR"
EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*")


@dataclass
class Reading:
    """What a line says. Losses may be NaN or infinite; counts are of an epoch."""

    format: str = ""  # empty: nothing of use
    rank: str = ""
    unix_time: float | None = None
    epoch: float | None = None
    step: float | None = None
    steps: float | None = None
    samples: int | None = None  # so far, of `of_samples`
    of_samples: int | None = None
    loss: float | None = None
    held_out: dict[str, float] = field(default_factory=dict[str, float])  # loss and accuracy of a test or validation
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    trouble: str = ""
    text: str = ""  # without rank and time


def read_line(line: str) -> Reading:
    """What a line says."""
    found = Reading()
    text = line[:MOST_CHARS]
    for pattern in PREFIXES * 2 if text[:1] in MAY_BEGIN else ():  # torchrun's --tee before torch's own
        if (match := pattern.match(text)) is not None and not (pattern is PREFIXES[3] and found.rank):
            if match[1] != found.rank:  # of srun --label around torchrun --tee both count
                found.rank = f"{found.rank}.{match[1]}" if found.rank else match[1]
            text = text[match.end() :]
    for pattern in TIMES if text[:1] in MAY_BEGIN else ():
        if (match := pattern.match(text)) is not None:
            found.unix_time, text = _time(match[1]), text[match.end() :].lstrip()
            break
    found.text = text
    small = text.lower()
    if any(word in small for word in OF_TROUBLE):
        found.trouble = next((name for name, pattern in TROUBLES if pattern.search(text)), "")
    if not any(word in small for word in OF_USE):  # most lines of most logs
        return found
    form = next((form for form in FORMATS if form.pattern.search(text)), VALUES)
    _read_groups(found, form, text)
    _read_values(found, form, text)
    told = (found.loss, found.samples_per_second, found.steps_per_second, *found.held_out.values())
    if form is not VALUES or any(value is not None for value in told):
        found.format = form.name
    return found


def _time(text: str) -> float | None:
    with suppress(ValueError, OverflowError, OSError):
        if len(text) > 15:
            return datetime.fromisoformat(text.replace(",", ".")).timestamp()
        hours, minutes, seconds = text.replace(",", ".").split(":")
        return 3600.0 * int(hours) + 60 * int(minutes) + float(seconds)
    return None


def _read_groups(found: Reading, form: Format, text: str) -> None:
    match = form.pattern.search(text)
    groups = {} if match is None else {name: value for name, value in match.groupdict().items() if value is not None}
    if "done" in groups:
        found.epoch, found.samples, found.of_samples = float(groups["epoch"]), int(groups["done"]), int(groups["total"])
    if "of" in groups and int(groups["of"]):
        found.held_out["accuracy"] = int(groups["right"]) / int(groups["of"])
    if "steps" in groups:
        found.step, found.steps = float(groups["step"]), float(groups["steps"])
    if "rate" in groups and (rate := _number(groups["rate"])):
        found.steps_per_second = 1 / rate if groups["unit"].startswith("s/") else rate


def _read_values(found: Reading, form: Format, text: str) -> None:
    for name, value, of in _values(text):
        match name:
            case "loss" if form.held_out:
                found.held_out.setdefault("loss", value)
            case "loss" if "train_runtime" not in text:  # else it is the mean of all
                found.loss = value if found.loss is None else found.loss
            case "held_out_loss":
                found.held_out.setdefault("loss", value)
            case "held_out_accuracy":
                found.held_out.setdefault("accuracy", value)
            case "accuracy" if found.loss is None:
                found.held_out.setdefault("accuracy", value)
            case "epoch":
                found.epoch = value if found.epoch is None else found.epoch
            case "step" if found.step is None:
                found.step, found.steps = value, of
            case "rate":
                found.samples_per_second = value
            case _:
                pass
    if (match := SPEED.search(text)) is not None:
        found.samples_per_second = _number(match[1])


def _values(text: str) -> Iterator[tuple[str, float, float | None]]:
    """The values with names that are known: what each is, its number, and of how many."""
    for match in KEY.finditer(text):
        name = next((name for name, pattern in NAMES.items() if pattern.fullmatch(match[1])), "")
        if (value := _number(match[2])) is not None:
            percent = "accuracy" in name and (text[match.end() : match.end() + 1] == "%" or value > 1)
            yield name, value / 100 if percent else value, _number(match[3]) if match[3] else None


def _number(text: str) -> float | None:
    with suppress(ValueError, OverflowError):
        value = float(text.replace(",", ""))
        return value if math.isfinite(value) or not text[-1].isdigit() else None
    return None
