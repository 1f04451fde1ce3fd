"""Reads one line of a training's log: rank, time, loss and throughput (no torch here).

A line may begin with a rank (srun --label, torchrun --tee, our own prefix) and a time.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

MOST_CHARS = 2000  # of a line: what is looked at
EXAMPLES = {
    "classic": "Train Epoch: 3 [2560/60000 (4%)]\tLoss: 0.12",
    "Hugging Face Trainer": "{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 1.2}",
    "progress bar": "Epoch 3: 40%|####      | 40/100 [00:04<00:06, 9.52it/s, loss=0.12]",
    "key and value": "epoch=3 step=40 loss=0.12, or: loss: 0.12",
}
PREFIX = re.compile(r"\[default([0-9]+)\]:|\[rank ?([0-9]+)\]:? ?|\[([0-9][0-9,-]*)\] |\s*([0-9]{1,5}): |"
                    r"rank ?([0-9]+) ?[:|,] ?", re.IGNORECASE)  # fmt: skip
TIME = re.compile(r"\[?((?:[0-9]{4}-[0-9]{2}-[0-9]{2}[ T])?[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,6})?)Z?\]?(?= |$)")
CLASSIC = re.compile(r"Train(?:ing)? Epoch:?\s*([0-9]+)\s*\[\s*([0-9]+)/[0-9]+", re.IGNORECASE)
TESTED = re.compile(
    r"(?:Test|Validation|Eval\w*)(?: set)?:?.{0,80}?Accuracy:?\s*([0-9]+)\s*/\s*([0-9]+)", re.IGNORECASE
)
BAR = re.compile(r"[0-9]{1,3}%\|[^|]*\|\s*[0-9]+/[0-9]+\s*\[[0-9:]+<[0-9:?]+(?:,\s*([0-9.]+)(\w+/\w+))?")
NUMBER = r"(?:tensor\()?([-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|\.[0-9]+|nan|inf(?:inity)?)(?![\w.]))"
NAMES = ("test loss", "test accuracy", "loss", "samples/s")  # by group of KEY
KEY = re.compile(
    r"(?<![\w/.-])['\"]?(?:((?:val|valid|validation|eval|test)[_ /]loss|average loss)"
    r"|((?:(?:val|valid|validation|eval|test)[_ /])?(?:accuracy|acc))"
    r"|(train[_ /]?loss|training[_ ]loss|loss/train|loss)"
    r"|((?:train[_ ])?samples[_ ]per[_ ]second|throughput|(?:samples|images|examples)/s(?:ec)?))['\"]?"
    rf"(?:\s*[=:]\s*|\s+)\[?'?{NUMBER}'?(%?)", re.IGNORECASE,
)  # fmt: skip
SPEED = re.compile(r"([0-9][0-9,]*(?:\.[0-9]*)?)\s*(?:samples|images|imgs?|examples)\s*(?:/|per )\s*s", re.IGNORECASE)
OF_USE = ("loss", "acc", "%|", "samples", "images", "img", "examples", "throughput")  # one is in each format


@dataclass
class Reading:
    """What a line contains. Losses may be NaN or infinite."""

    format: str = ""  # empty: nothing of use
    rank: str = ""
    unix_time: float | None = None
    samples: tuple[int, int] | None = None  # epoch, and how many of it
    values: dict[str, float] = field(default_factory=dict[str, float])
    """loss, test loss, test accuracy, samples/s, steps/s"""


def read_line(line: str) -> Reading:
    """What a line contains."""
    found, text = Reading(), line[:MOST_CHARS]
    while (match := PREFIX.match(text)) is not None:  # torchrun's --tee before torch's own
        rank = next(group for group in match.groups() if group)
        if rank != found.rank:  # of srun --label around torchrun --tee both count
            found.rank = f"{found.rank}.{rank}" if found.rank else rank
        text = text[match.end() :]
    if (match := TIME.match(text)) is not None:
        found.unix_time, text = _time(match[1]), text[match.end() :]
    if not any(word in text.lower() for word in OF_USE):  # most lines of most logs
        return found
    if match := CLASSIC.search(text):
        found.format, found.samples = "classic", (int(match[1]), int(match[2]))
    elif (match := TESTED.search(text)) and int(match[2]):
        found.format, found.values["test accuracy"] = "classic", int(match[1]) / int(match[2])
    elif match := BAR.search(text):
        found.format = "progress bar"
        if match[1] and (speed := float(match[1])):
            found.values["steps/s"] = 1 / speed if match[2].startswith("s/") else speed
    for match in KEY.finditer(text):
        *groups, number, sign = match.groups()
        name, value = (
            next(name for name, group in zip(NAMES, groups, strict=True) if group),
            float(number.replace(",", "")),
        )
        percent = name == "test accuracy" and (sign or value > 1)
        if name != "loss" or "train_runtime" not in text:  # else it is the mean of all
            found.values.setdefault(name, value / 100 if percent else value)
    if match := SPEED.search(text):
        found.values["samples/s"] = float(match[1].replace(",", ""))
    if not found.format and found.values:
        found.format = "Hugging Face Trainer" if text.lstrip().startswith("{'") else "key and value"
    return found


def _time(text: str) -> float | None:
    with suppress(ValueError, OverflowError, OSError):
        text = text.replace(",", ".")
        return datetime.fromisoformat(text if "-" in text else f"1970-01-02 {text}").timestamp()
    return None
