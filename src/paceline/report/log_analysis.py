"""The loss and throughput of a training, from the lines of its log or from the events of a run (no torch here)."""

import math
import os
import re
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from paceline.errors import PacelineError
from paceline.report.figures import Figure, make_line_trace
from paceline.report.logs import open_log_time_index, rank_log_files
from paceline.report.run import RunData
from paceline.runs.console import remove_control_characters
from paceline.runs.events import Evaluated, Step, event_files, read_events
from paceline.runs.folder import attempt_dirs
from paceline.runs.owners import open_file

BLOCK_BYTES, MAX_CHARS, MAX_RANKS = 1 << 18, 2000, 4096  # MAX_CHARS: per line
MAX_PAGE_BYTES, WINDOW_SECONDS = 8 << 20, 5.0  # of all logs, for a page; times have a resolution of a second
RATES = ("samples/s", "samples/s (counted)", "steps/s")
EXAMPLES = {
    "classic": "Train Epoch: 3 [2560/60000 (4%)]\tLoss: 0.12",
    "Hugging Face Trainer": "{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 1.2}",
    "progress bar": "Epoch 3: 40%|####      | 40/100 [00:04<00:06, 9.52it/s, loss=0.12]",
    "key and value": "epoch=3 step=40 loss=0.12, or: loss: 0.12",
}
# the rank, as srun --label, torchrun --tee, paceline and scripts print it
RANK_PREFIX = re.compile(r"\[default([0-9]+)\]:|\[rank ?([0-9]+)\]:? ?|\[([0-9][0-9,-]*)\] |\s*([0-9]{1,5}): |"
                    r"rank ?([0-9]+) ?[:|,] ?", re.IGNORECASE)  # fmt: skip
TRAIN_EPOCH_LINE = re.compile(r"Train(?:ing)? Epoch:?\s*([0-9]+)\s*\[\s*([0-9]+)/[0-9]+", re.IGNORECASE)
TQDM_BAR = re.compile(r"[0-9]{1,3}%\|[^|]*\|\s*[0-9]+/[0-9]+\s*\[[0-9:]+<[0-9:?]+(?:,\s*([0-9.]+)(\w+/\w+))?")
NUMBER = r"(?:tensor\()?([-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|\.[0-9]+|nan|inf(?:inity)?)(?![\w.]))"
KEY_VALUE_NAMES = ("test loss", "loss", "samples/s")  # by group of KEY
KEY_VALUE = re.compile(
    r"(?<![\w/.-])['\"]?(?:((?:val|valid|validation|eval|test)[_ /]loss|average loss)"
    r"|(train[_ /]?loss|training[_ ]loss|loss/train|loss)"
    r"|((?:train[_ ])?samples[_ ]per[_ ]second|throughput|(?:samples|images|examples)/s(?:ec)?))['\"]?"
    rf"(?:\s*[=:]\s*|\s+)\[?'?{NUMBER}", re.IGNORECASE,
)  # fmt: skip
SAMPLES_PER_SECOND = re.compile(
    r"([0-9][0-9,]*(?:\.[0-9]*)?)\s*(?:samples|images|imgs?|examples)\s*(?:/|per )\s*s", re.IGNORECASE
)
KEYWORDS = ("loss", "%|", "samples", "images", "img", "examples", "throughput")  # each format contains one


class ParsedLine(NamedTuple):
    format: str  # empty: neither loss nor throughput
    rank: str
    values: dict[str, float]  # test loss, loss, samples/s, steps/s; losses may be NaN or infinite
    samples: tuple[int, int] | None = None  # epoch, and finished samples of this epoch


class LogAnalysis(msgspec.Struct):
    """The output of `paceline analyze --json`: each value in the order of the lines."""

    name: str
    lines: int = 0
    formats: dict[str, int] = {}  # format -> number of lines
    ranks: list[str] = []
    values: dict[str, list[float]] = {}
    """The losses of the first rank that prints them; samples/s and steps/s of all ranks."""
    not_finite: dict[str, int] = {}  # rank -> losses that are NaN or infinite
    first_line: str = ""


def parse_log_line(line: str) -> ParsedLine:
    rank, log_format, samples, text, values = "", "", None, line[:MAX_CHARS], dict[str, float]()
    while (match := RANK_PREFIX.match(text)) is not None:  # torchrun's --tee precedes other prefixes
        label = next(group for group in match.groups() if group)
        if label != rank:  # both labels of srun --label around torchrun --tee
            rank = f"{rank}.{label}" if rank else label
        text = text[match.end() :]
    if not any(word in text.lower() for word in KEYWORDS):  # most lines of most logs
        return ParsedLine("", rank, {})
    if match := TRAIN_EPOCH_LINE.search(text):
        log_format, samples = "classic", (int(match[1]), int(match[2]))
    elif match := TQDM_BAR.search(text):
        log_format = "progress bar"
        if match[1] and (speed := float(match[1])):
            values["steps/s"] = 1 / speed if match[2].startswith("s/") else speed
    for match in KEY_VALUE.finditer(text):
        name = KEY_VALUE_NAMES[next(group for group in range(3) if match[group + 1])]
        if name != "loss" or "train_runtime" not in text:  # otherwise it is the mean of the training
            values.setdefault(name, float(match[4].replace(",", "")))
    if match := SAMPLES_PER_SECOND.search(text):
        values["samples/s"] = float(match[1].replace(",", ""))
    if not log_format and values:
        log_format = "Hugging Face Trainer" if text.lstrip().startswith("{'") else "key and value"
    return ParsedLine(log_format, rank, values, samples)


class LogAnalyzer:
    def __init__(self, name: str) -> None:
        self.result = LogAnalysis(name)
        self._owners: dict[str, str] = {}  # name of a value -> the rank that prints it
        self._anchors: dict[str, tuple[float, tuple[int, int]]] = {}  # rank -> time, and samples then

    def add(self, reading: ParsedLine, unix_time: float | None = None) -> None:
        result = self.result
        result.lines += 1
        if reading.rank and reading.rank not in result.ranks and len(result.ranks) < MAX_RANKS:
            result.ranks = sorted([*result.ranks, reading.rank], key=lambda rank: (len(rank), rank))
        if reading.format:
            result.formats[reading.format] = result.formats.get(reading.format, 0) + 1
        if not math.isfinite(reading.values.get("loss", 0.0)):
            result.not_finite[reading.rank] = result.not_finite.get(reading.rank, 0) + 1
        for name, value in reading.values.items():
            if self._owners.setdefault(name, reading.rank) == reading.rank or name.endswith("/s"):
                result.values.setdefault(name, []).append(value)
        if unix_time is not None and reading.samples:
            self._count_samples(reading.rank, unix_time, *reading.samples)

    def _count_samples(self, rank: str, now: float, epoch: int, done: int) -> None:
        before, (same, start) = self._anchors.setdefault(rank, (now, (epoch, done)))
        forward = epoch == same and done >= start
        if not forward or not 0 <= now - before < WINDOW_SECONDS:
            self._anchors[rank] = now, (epoch, done)
            if forward and done > start and now > before:
                self.result.values.setdefault("samples/s (counted)", []).append((done - start) / (now - before))

    def add_log(self, path: Path, *, rank: str = "") -> None:
        times, end = open_log_time_index(path), 0
        with open_file(path) as file, os.fdopen(file.descriptor, "rb", closefd=False) as log:
            while block := log.readline(BLOCK_BYTES):
                end += len(block)
                for part in block.rstrip(b"\r\n").split(b"\r"):  # each state of a progress bar
                    text = remove_control_characters(part[: 4 * MAX_CHARS].decode(errors="replace"))
                    self.result.first_line = self.result.first_line or text[:120].strip()
                    reading = parse_log_line(text)
                    self.add(reading._replace(rank=rank or reading.rank), times and times.time_at(end - 1))

    def add_run(self, run_dir: Path, *, max_bytes: float = math.inf) -> None:
        """Add the events of a run, or without events its logs, up to `max_bytes` (OSError if they cannot be read)."""
        events = event_files(run_dir)
        for rank, path in events.items():
            for event in read_events(path):
                if isinstance(event, Step):
                    loss = math.nan if event.skipped else event.loss  # a loss that is not finite is written as 0
                    rate = {"samples/s": event.samples / event.seconds} if event.seconds > 0 else {}
                    self.add(ParsedLine("events", str(rank), {"loss": loss, **rate}))
                elif isinstance(event, Evaluated) and "loss" in event.metrics:
                    self.add(ParsedLine("events", str(rank), {"test loss": event.metrics["loss"]}))
        for attempt in attempt_dirs(run_dir).values() if not events else ():
            for rank, path in rank_log_files(attempt).items():
                if (max_bytes := max_bytes - path.lstat().st_size) >= 0:
                    self.add_log(path, rank=str(rank))


def figures_from_logs(run: RunData) -> tuple[list[Figure], str]:
    """The figures from the logs of a script without events, and a sentence. Empty for a run with events."""
    analyzer = LogAnalyzer(run.name)
    if run.ranks:
        return [], ""
    try:
        analyzer.add_run(run.folder, max_bytes=MAX_PAGE_BYTES)
    except (OSError, PacelineError) as error:
        run.unreadable_parts.append(f"logs: {error}")
    values = analyzer.result.values
    figures = [
        Figure(f"logged-{number}", name.capitalize(), f"The {name} in the log, line by line.",
               [make_line_trace(name, [[float(index) for index in range(len(series))]], series, number)],
               x="lines that contain it", y=name, log=name == "loss")
        for number, (name, series) in enumerate(values.items()) if name not in RATES and len(series) > 1
    ]  # fmt: skip
    rates = (f" Its median throughput is {median(values[unit]):,.3g} {unit}." for unit in RATES if unit in values)
    rate = next(rates, "")
    return figures, f"This script recorded no steps. The curves are from its logs.{rate}" if figures else ""
