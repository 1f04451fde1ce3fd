"""Numbers on pages that refer to a record are those of the record.

`tools/measured.py` writes the tables of docs/benchmarks.md, `tools/includes.py` those of the strategies' chapters; what
they write is compared in test_docs.py. This file compares the numbers that were typed by hand.
"""

import importlib
import json
import posixpath
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WRITTEN = re.compile(r"<!-- (?:goals|records|measured)[^>]*-->.*?<!-- end -->", re.DOTALL)  # by a tool
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def record(name: str) -> Any:
    text = (RESULTS / name).read_text()
    return json.loads(text) if name.endswith(".json") else text


def speeds(*of: tuple[str, str, str, str], low: bool = False) -> list[str]:
    """The speed of a contender, of another one = 1, over laps of one round; the median or the lower quartile."""
    summary = importlib.import_module("summary")
    found = list[str]()
    for file, work, contender, base in of:
        own, other = (summary.row(RESULTS / file, work, name) for name in (contender, base))
        ratios = summary.ratios(own, other)
        found.append(f"{summary.lower_quartile(ratios) if low else median(ratios):.2f}")
    return found


def in_memory() -> list[str]:
    limit = ("peers.json", "W3"), ("peers-4.json", "W3"), ("peers.json", "W3g")
    return speeds(*((file, work, "default", "no-exchange") for file, work in limit))


def two_hosts() -> list[str]:
    works = [f"{work} 1gbit" for work in ("W1", "W3g")]
    found = speeds(*(("two-hosts.json", work, "default", "vanilla") for work in works), low=True)
    for work, digits in zip(works, (1, 0), strict=True):
        sent = record("two-hosts.json")["works"][work]["sent_mb_by_a_host"]
        found += [f"{sent[name]:.{digits}f}" for name in ("default", "vanilla")]
    return found


def gpu(*names: str, low: bool = False) -> list[str]:
    return speeds(*(("gpu.json", "W1 fp32", name, "vanilla") for name in names), low=low)


def gpu_goal() -> str:
    """The lower quartile, as the table of goals has it."""
    summary = importlib.import_module("summary")
    own, other = (summary.row(RESULTS / "gpu.json", "W1 fp32", name) for name in ("default", "vanilla"))
    return f"{summary.lower_quartile(summary.ratios(own, other)):.3f}"


def gpu_day() -> list[str]:
    """The accuracies after an epoch, the speeds of copies, and the seconds after which hangs were reported."""
    said = " ".join(step["found"] for step in record("gpu-nvidia-h200.json")["steps"].values())
    accuracies = re.findall(r"(?:fp32|bf16|graphs|compile) ([\d.]+) %", said)
    copies = re.findall(r"locked; ([\d.]+) GB/s, not locked ([\d.]+)", said)[0]
    return [f"{float(one):.1f}" for one in accuracies] + [f"{float(one):.0f}" for one in copies]


def mesh() -> list[str]:
    """The time of a step, of the manual one = 1."""
    found = record("mesh.json")
    return [f"{1 / found[name]['speed beside by hand']['median']:.2f}" for name in ("tensor=2", "pipeline=2")]


def lora_runs() -> list[str]:
    return [str(sum(not case["problems"] for case in record("lora.json")["cases"].values()))]


def equal_stops() -> list[str]:
    return [str(sum(repeat["same_bits"] for repeat in record("stops.json")["repeats"].values()))]


def probe() -> list[str]:
    ratios = [one["ratio"] for one in record("probe.json").values() if isinstance(one, dict)]
    return [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]


def digests() -> list[str]:
    return [str(len(record("bits-digests.json")["cases"]))]


def changed_lines() -> list[str]:
    """Lines added to and removed from an MNIST loop with DDP, Accelerate, Fabric and paceline."""
    row = next(line for line in record("lines.md").splitlines() if line.startswith("| mnist |"))
    paceline, accelerate, fabric, ddp = (cell.split(" + ") for cell in row.removesuffix(" |").split(" | ")[1:])
    return [*ddp, *accelerate, *fabric, *paceline]


def one_process(what: str) -> list[str]:
    found = [record("one_process.json")[name][what] for name in ("DDP", "Accelerate", "Fabric", "paceline")]
    return [f"{one:.2f}" if one > 1e-9 else f"{one:.0e}".replace("e-0", "e-") for one in found]


def faults(name: str, of: str, culprits: str) -> list[str]:
    """Kinds of faults, and how often the rank and the line were named, in %."""
    said = rf"^- {of}, (\d+) faults.*?, \d+ runs: .*?{culprits} (\d+) of (\d+) .*?right line (\d+) of (\d+)"
    columns = zip(*re.findall(said, record(name), re.MULTILINE), strict=True)
    kinds, ranks, cases, named, places = (sum(map(int, column)) for column in columns)
    return [str(kinds), f"{ranks / cases:.0%}"[:-1], f"{named / places:.0%}"[:-1], str(ranks), str(cases)]


def of_torchrun() -> list[str]:
    return faults("faults.md", "torchrun", "single culprits")


def of_readme() -> list[str]:
    kinds, rank, line, *_ = faults("faults-once.md", "paceline", "right rank")
    peers = [faults("faults-peers.md", name, "single culprits") for name in ("torchrun", "accelerate", "fabric")]
    assert len({cases for *_, cases in peers}) == 1
    return [kinds, peers[0][-1], *(rate for _, *rates, _, _ in peers for rate in rates), rank, line]


def lines() -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for name, one in record("congestion.json").items():
        if name != "machine":
            steps = one["median_step_seconds_of_each_start"]
            found[name] = [f"{one['volume_alone_seconds']:.2f} s"]
            for kind in ("cubic", "reno", "bbr"):
                of = [f"{x:.2f}" for way, values in steps.items() if way.endswith(f", {kind}") for x in values]
                found[name].append(" to ".join(dict.fromkeys((min(of), max(of)))) + " s" if of else "-")
    return found


def planted(name: str) -> list[str]:
    rows = [line.split("|")[-2].strip() for line in record(name).splitlines() if line.startswith("| ")]
    assert {*rows} <= {"verdict", "named", "right", "no finding, right"}
    return [str(rows.count("named"))]


def hook() -> list[str]:
    return [f"{record('ddp-hook.json')['ratios'][work]['median']:.2f}" for work in ("W1", "W2", "W3", "W3g")]


def session() -> list[str]:
    found = record("session.json")
    return [f"{found[f'{work}, {ranks} ranks']['median']:.2f}" for work in ("cnn", "mlp") for ranks in (1, 2)]


def peers() -> list[str]:
    alone = importlib.import_module("summary").row(RESULTS / "peers.json", "W1", "one-rank")
    ratio = ("peers.json", "W1", "default", "vanilla")
    return [f"{median(filter(None, alone.ms)):.0f}", *speeds(ratio), *speeds(ratio, low=True)]


def checks() -> list[str]:
    found = [record("checks.json")[f"{ranks} ranks"]["checks"]["all"][1] for ranks in (1, 2)]
    return [f"{found[0]:.1f}", f"{found[1]:.0f}"]


def hosts() -> list[str]:
    found = record("hosts.json")["summary"]
    return [*(f"{one:.1f}" for one in found["standstill seconds: median, most"]), str(found["returns"])]


def causes() -> list[str]:
    named = [one["named"] for runs in record("report-causes.json")["causes"].values() for one in runs]
    return [str(sum(named)), str(len(named))]


def balance() -> list[str]:
    speed, sleeps = (record("balance.json")[part]["of_the_limit"] for part in ("speed", "sleeps"))
    numbers = *(speed[kind] for kind in ("equal", "2:1", "auto")), sleeps["auto"], sleeps["equal"]
    return [f"{number:.3f}" for number in numbers]


def thousand() -> list[str]:
    last = record("thousand.json")["rows"][-1]
    return [f"{last['quiet_cpu'] * 100:.0f}", f"{last['head_mib']:.0f}"]


def doubled() -> list[str]:
    ranks = [line.split("|")[3].strip() for line in record("nccl-double.md").splitlines() if line.startswith("| ")][2:]
    return [str(len(ranks)), str(ranks.count("yes"))]


def classic() -> list[str]:
    return ["1e-12"] if max(one["apart"] for one in record("classic.json").values()) < 1e-12 else []


def long_run() -> list[str]:
    found = record("report.json")
    return [f"{found['events']:,}", str(found["ranks"])]


def watched() -> list[str]:
    return [str(len({run.split(", ")[0] for run in record("watchover.json")["runs"]}))]


def small_sums() -> list[str]:
    found = [record("small-sums.json")[f"{ranks} ranks, 20 ms, 100 Mbit/s"] for ranks in (2, 4)]
    return [f"{median(one[way]):.0f}" for way in ("paceline", "all_reduce") for one in found]


class Typed(NamedTuple):
    """A sentence of a page: # stands for a number of the record, ... for other words."""

    page: str
    record: str
    sentence: str
    numbers: Callable[[], list[str]]


TYPED = [Typed(*row) for row in (
    ("own-loop.md", "session.json", "takes # times (1 rank) and # times (2 ranks) ... takes # and # times", session),
    ("own-loop.md", "checks.json", "take # microseconds per step on 1 rank and # on 2 ranks", checks),
    ("own-loop.md", "classic.json", "ends within # of its original", classic),
    ("speed.md", "ddp-hook.json", "steps # (CNN), # (ResNet18), # (MLP, 25 M) and # (GPT, 10 M) times as fast", hook),
    ("../tests/doubles/README.md", "nccl-double.md", "| # [faults](../../docs/faults.md) ... | # with the right rank",
     doubled),
    ("gpu.md", "gpu.json", "| **#**, with `--cuda-graphs` #, with `--compile` # (medians ... lower quartile, #)",
     lambda: gpu("default", "cuda-graphs", "compile") + gpu("default", low=True)),
    ("benchmarks.md", "gpu.json",
     "On a GPU the median is # and the lower quartile ... one GPU, W1 default / tutorial ... | #",
     lambda: [*gpu("default"), gpu_goal()]),
    ("gpu.md", "gpu-nvidia-h200.json", "accuracy # %, # %, # %, # % | ... page-locked: # GB/s; other memory # GB/s",
     gpu_day),
    ("../README.md", "gpu.json", "trains at [# of DDP's speed]", lambda: gpu("default")),
    ("../README.md", "bits-digests.json", "([# runs](benchmarks/results/bits-digests.json), ", digests),
    ("hugging-face.md", "lora.json", "[# runs](../benchmarks/results/lora.json) end within", lora_runs),
    ("scripts.md", "stops.json", "[# stops](../benchmarks/results/stops.json)", equal_stops),
    ("../README.md", "lines.md", "results/lines.md) | # + # | # + # | # + # | # + # |", changed_lines),
    ("../README.md", "one_process.json", "last batch has 5 samples, ... | # | # | # | # |",
     partial(one_process, "last batch")),
    ("../README.md", "one_process.json", "window is incomplete ... | # | # | # | # |",
     partial(one_process, "last window")),
    ("../README.md", "faults-once.md",
     "[# kinds](benchmarks/results/faults-once.md) of injected faults (peers: [#](benchmarks/results/"
     "faults-peers.md) with one faulty rank): ... | # %, # % | # %, # % | # %, # % | # %, # % |",
     of_readme),
    ("../README.md", "faults-peers.md", "(peers: [#](benchmarks/results/faults-peers.md) with one faulty rank)",
     lambda: of_readme()[1:2]),
    ("faults.md", "faults-once.md", "[All # kinds](../benchmarks/results/faults-once.md)",
     lambda: faults("faults-once.md", "paceline", "right rank")[:1]),
    ("faults.md", "faults.md", "[# kinds](../benchmarks/results/faults.md) several",
     lambda: faults("faults.md", "paceline", "right rank")[:1]),
    ("launch/by-hand.md", "faults.md", "for # of # faults of one rank", lambda: of_torchrun()[3:]),
    ("design.md", "faults.md", "right rank for # of # [faults]", lambda: of_torchrun()[3:]),
    ("mesh.md", "mesh.json", "With `tensor=2` it took # of the time, and with `pipeline=2` #", mesh),
    ("existing-script.md", "probe.json", "with the guard # to # of that without", probe),
    ("report.md", "report-causes.json", "(../benchmarks/results/report-causes.json) # of # times", causes),
    ("report.md", "report.json", "A folder of # events on # ranks", long_run),
    ("balance.md", "balance.json",
     "numbers reach # of the ... `2:1` # and `auto` # ... `auto` reached # and equal numbers #", balance),
    ("design.md", "thousand.json", "cost the coordinator # % of a core and # MB", thousand),
    ("verify.md", "loop-mutations.md", "[# planted bugs](../benchmarks/results/loop-m",
     partial(planted, "loop-mutations.md")),
    ("verify.md", "mutations.md", "[# planted bugs](../benchmarks/results/mut", partial(planted, "mutations.md")),
    ("watchover.md", "watchover.md", "for all # kinds", watched),
    ("shared-memory.md", "peers.json",
     "reaches # on this MLP with 2 ranks (only 3 usable pairs), # with 4, and # on the GPT", in_memory),
    ("slow-networks.md", "small-sums.json",
     "takes # ms for 2 ranks and # ms for 4; torch's all-reduce takes # ms and # ms", small_sums),
    ("benchmarks.md", "two-hosts.json",
     "1 Gbit/s: # (CNN) and # (GPT) ... # MB sent by a node in a step instead of #, # MB instead of # (", two_hosts),
    ("benchmarks.md", "peers.json", "it took # ms, and the ratio was # (median; lower quartile #,", peers),
    ("launch/ssh.md", "hosts.json", "lasts # s, at most # s (median and most of # returns", hosts),
)]  # fmt: skip
TABLES = {"exactness.json", "slow-network.json", "congestion.json"}  # compared row by row below
NO_NUMBERS = {  # the page links to the record and states no number of it
    "check.md", "same.json", "silent.md", "strangers.json", "ends.md", "hostile-0.json", "connections.json",
    "audit.json", "peers-4.json", "verify-mnist-cnn.txt", "verify-mnist-resnet18.txt", "verify-own_task.txt",
    "ladder.json",
}  # fmt: skip


def pattern(sentence: str) -> str:
    words = re.escape(sentence).replace(r"\#", r"([\d.,e-]*\d)").replace(r"\ \.\.\.\ ", r".*?")
    return words.replace(r"\ ", r"\s+")


@pytest.mark.parametrize("typed", TYPED, ids=[f"{typed.page}-{typed.record}" for typed in TYPED])
def test_a_typed_number_is_that_of_its_record(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = re.search(pattern(typed.sentence), (ROOT / "docs" / typed.page).read_text(), re.DOTALL)
    assert found, typed
    assert [*found.groups()] == typed.numbers()


def rows(page: str, name: str) -> list[list[str]]:
    """The cells of the tables between a record's link and the next heading."""
    text = (ROOT / page).read_text().split(f"results/{name}", 1)[1]
    text = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]
    return [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]


def test_the_ways_to_fill_a_link_are_those_of_the_record() -> None:
    (_, _, *found) = rows("docs/slow-networks.md", "congestion.json")
    assert [row[1:] for row in found[:3]] == [*lines().values()]


def test_the_times_of_exact_steps_are_those_of_the_record() -> None:
    values = {
        (one["model"], one["virtual_ranks"], one["table"], one["name"]): one["values"]
        for one in record("exactness.json")["rows"]
    }
    models = [*dict.fromkeys(model for model, *_ in values)]
    wall = "wall time of a step / ddp's"
    found = {row[0]: row[1:] for row in rows("docs/exactness.md", "exactness.json")}
    labels = [(label, label[-1:], label.split("`")[1]) for label in found if label.endswith(("V = 2", "V = 4"))]
    labels += [(label, "4", "exact") for label in found if "each process two" in label]
    labels += [(label, "2", "exact / exact, any kernels") for label in found if label.startswith("deterministic")]
    assert len(labels) == 4
    for label, count, name in labels:
        virtual_ranks = int(count)
        assert found[label] == [f"{median(values[model, virtual_ranks, wall, name]):.2f}" for model in models]
    safe = "keeping the state safe (exact)"
    optimizers = [f"optimizer of {name}, MB a rank" for name in ("exact", "zero")]
    for label, names, number in (
        ("optimizer state a rank", optimizers, "{:.2g}, {:.2g} MB"),
        ("a snapshot every 10 steps", ["snapshot every 10 steps, %"], "{:.1f} %"),
        ("comparing replicas", ["watch every 100 steps, %"], "{:.1g} %"),
        ("a checkpoint: training", ["checkpoint, ms of standstill"], "{:.0f} ms"),
        ("a step while one is written", ["step during a checkpoint / without"], "{:.2f}"),
    ):
        (cells,) = (cells for row, cells in found.items() if row.startswith(label))
        assert cells == [number.format(*(median(values[model, 2, safe, name]) for name in names)) for model in models]


def test_the_speeds_on_a_slow_network_are_those_of_the_record() -> None:
    speeds_of = record("slow-network.json")["speeds"]
    found = rows("docs/slow-networks.md", "slow-network.json")
    ways = {"DDP, ms a step": "ddp", "paceline as it is": "paceline", "`--compress powersgd`": "powersgd"}
    tables = [(n, row[0]) for n, row in enumerate(found) if row[1:2] == ["1 Gbit/s"]]
    works = {"CNN": "W1", "MLP": "W3s", "GPT, 2.7": "W3gs"}
    compared = 0
    for start, title in tables:
        work = next((key for words, key in works.items() if title.startswith(words)), None)
        for row in found[start + 2 : start + 12] if work else ():
            for cell, rate in zip(row[1:4], ("1gbit", "100mbit", "10mbit"), strict=True):
                if row[0] in ways:
                    way, one = ways[row[0]], speeds_of[f"{work} {rate} 20ms"]
                    wanted = f"{mean(one['ms'][way]):,.0f} ms" if way == "ddp" else f"{mean(one['times_ddp'][way]):.1f}"
                    assert cell == wanted, (title, row[0], rate)
                    compared += 1
    assert compared == 27


def test_every_reference_to_a_record_is_compared() -> None:
    compared = {(posixpath.normpath(f"docs/{typed.page}"), typed.record) for typed in TYPED}
    for page in PAGES:
        here = str(page.relative_to(ROOT))
        for name in re.findall(r"\]\((?:\.\./)*benchmarks/results/([\w.-]+)\)", WRITTEN.sub("", page.read_text())):
            assert (here, name) in compared or name in TABLES | NO_NUMBERS, f"{here}: {name}"
