"""Write the numbers of records into docs/benchmarks.md: `python tools/measured.py`; `--check`: are they the records'?

`<!-- goals -->` precedes the table of benchmarks/summary.py, `<!-- records -->` the table of CLAIMS. Both end
with `<!-- end -->`. The dates are those of the commits that recorded the numbers. `--check` does not compare the dates,
because a clone may lack the history.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
CHECK = sys.argv[1:] == ["--check"]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- (goals|records) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
DATE = re.compile(r"(?: \|)? [0-9-]{10}, [0-9a-f]{7}(?: \|)?")
GOALS_FROM = ("peers.json", "peers-4.json", "startup.json", "epoch.json", "collectives.json", "memory.json")
SETS = ("first", "fresh", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
HEAD = "| what | measured | record | repeat with | recorded on |\n|---|---|---|---|---|\n"


class Claim(NamedTuple):
    """A row: what was measured, the numbers from its records, and the command that measures it again."""

    what: str
    measured: Callable[..., str]
    records: tuple[str, ...]
    command: str


def read(record: str) -> Any:
    """A record: decoded if it is JSON, else its text."""
    text = (RESULTS / record).read_text()
    return json.loads(text) if record.endswith(".json") else text


def numbers(pattern: str, text: str) -> tuple[str, ...]:
    """What the groups of a pattern match in a record."""
    found = re.search(pattern, text)
    assert found, f"no record says {pattern!r}"
    return found.groups()


def _digests(*parts: Any) -> str:
    cases = [case for part in parts for case in part["cases"].values()]
    rows = {case["row"] for case in cases}
    pairs = {(case["row"], case["digest"]) for case in cases}
    wrong = sum(bool(case["faults"]) for case in cases)
    return f"{len(cases)} runs, {len(pairs)} digests in {len(rows)} configurations, {wrong} faults"


def _survived(record: Any) -> str:
    cases = record["cases"].values()
    return f"{sum(bool(case['told'].get('survivors')) for case in cases)} of {len(cases)}"


def _planted(text: str) -> str:
    rows = [row.split("|")[-2].strip() for row in text.splitlines() if row.startswith("| ")]
    rows.remove("verdict")
    right = [verdict for verdict in rows if verdict in ("no finding, right", "right")]
    return f"{rows.count('named')} of {len(rows) - len(right)}; nothing in {len(right)} correct ones"


def _startup(record: Any) -> str:
    ratios = [median(record["ratios"][f"{ranks} ranks: preload auto / torchrun"]) for ranks in (2, 4)]
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _faults(text: str, of: str = "paceline", rank: str = "right rank") -> str:
    said = rf"^- {of}, (\d+) faults.*?, (\d+) runs: .*?{rank} (\d+) of (\d+) .*?right line (\d+) of (\d+)"
    kinds, runs, ranks, cases, lines, places = (
        sum(map(int, column)) for column in zip(*re.findall(said, text, re.MULTILINE), strict=True)
    )
    return f"{kinds} kinds, {runs} runs: rank {ranks / cases:.0%}, line {lines / places:.0%}"


def _silent(text: str) -> str:
    found = re.findall(r"^- \w+: (\d+) of (\d+) found", text, re.MULTILINE)
    false, scripts = numbers(r"(\d+) false findings in (\d+) clean", text)
    return f"{', '.join(f'{a} of {b}' for a, b in found)}; {false} false findings in {scripts} correct scripts"


def _frameworks(text: str) -> str:
    rows = re.findall(r"^\| \w+ \| (?:collate|callback|step) \| (\w+) \| (\w+) \| (\d+) \|", text, re.MULTILINE)
    return f"{rows.count(('yes', 'yes', '0'))} of {len(rows)}"


def _named(record: Any) -> str:
    named = [run["named"] for runs in record["causes"].values() for run in runs]
    return f"{sum(named)} of {len(named)}"


def _watchover(record: Any) -> str:
    runs = record["runs"].values()
    return f"{len(runs)} runs of {len({name.split(', ')[0] for name in record['runs']})} kinds of faults"


def _thousand(record: Any) -> str:
    last = record["rows"][-1]
    return (
        f"{last['nodes']:,} nodes: joined after {last['joined_seconds']:.1f} s, hang named after "
        f"{last['named_seconds']:.1f} s, stopped after {last['stop_seconds']:.2f} s, "
        f"{last['quiet_cpu']:.1%} of a core, {last['head_mib']:.0f} MiB"
    )


def _second(*texts: str) -> str:
    found = total = 0
    for text in texts:
        table = re.findall(r"^\| (?:silent )?(?:faults|pitfalls) \| (\d+) of (\d+)", text, re.MULTILINE)
        counts = table or re.findall(r"(\d+) of (\d+) found", text)[:1]
        assert counts, text[:80]
        found, total = found + sum(int(a) for a, _ in counts), total + sum(int(b) for _, b in counts)
    false = sum(int(n) for text in texts for n in re.findall(r"(\d+) false findings? in \d+ runs", text))
    return f"{found} of {total} found ({found / total:.0%}), {false} false findings"


CLAIMS = (
    Claim(
        "digests of weights and state, 3 models, AdamW and SGD, `exact` and `zero`, on 1 to 8 processes",
        _digests, ("bits-digests.json",), "make soak-bits",
    ),
    Claim("the same after killed workers and restarts", _digests, ("bits-workers.json",), "make soak-bits"),
    Claim("the same after killed launchers and resumes", _digests, ("bits-launchers.json",), "make soak-bits"),
    Claim(
        "loops drawn from a seed, compared with the plain loop of one process",
        lambda record: "{equal:,} of {loops:,} equal, {rejected} rejected with an error, {failures} wrong".format(
            **record["right loops"]
        ),
        ("loops.json",), "make soak-loops",
    ),
    Claim("planted bugs of tasks that `verify` names", _planted, ("mutations.md",), "make soak-mutations"),
    Claim("planted bugs of loops that `verify` names", _planted, ("loop-mutations.md",), "make soak-mutations"),
    Claim(
        "damaged checkpoints and writers killed at a random byte: damaged ones that were loaded",
        lambda record: f"{len(record['failures'])} of {record['done']}", ("checkpoint-fuzz.json",), "make soak-fuzz",
    ),
    Claim(
        "`kill -9` of the launcher: runs that left processes behind",
        lambda record: f"{record['with_survivors']} of {len(record['kills'])}", ("kills.json",), "make soak-kills",
    ),
    Claim(
        "kills of launchers, agents, ranks and sessions on ssh and Slurm nodes: runs that left processes behind",
        _survived,
        ("launch-kills.json",), "make soak-launch",
    ),
    Claim(
        "runs of 2 to 4 ssh nodes with random losses and returns: equal weights and a clean ledger",
        lambda record: "{right} of {runs} runs with {losses} losses".format(**record["summary"]),
        ("hosts.json",), "make soak-hosts",
    ),
    Claim(
        "time from the command to the first step, torchrun = 1; 2 ranks, 4 ranks", _startup,
        ("startup.json",), "python benchmarks/startup.py",
    ),
    Claim(
        "one epoch of MNIST from the command to the accuracy, speed of the DDP tutorial's script = 1, median",
        lambda record: f"{median(record['ratio']):.2f}", ("epoch.json",), "python benchmarks/epoch.py",
    ),
    Claim("faults with known causes, once: rank and line named", _faults, ("faults-once.md",), "make soak-faults"),
    Claim(
        "some of them with torchrun and DDP, Accelerate or Fabric (equal), for faults of a single rank",
        lambda text: _faults(text, "fabric", "single culprits"), ("faults-peers.md",), "make soak-faults",
    ),
    Claim(
        "faults under torchrun, srun and mpirun with `paceline watchover`", _watchover,
        ("watchover.json",), "make soak-watchover",
    ),
    Claim(
        "hangs in Trainer, Accelerate, Lightning and Ignite scripts: right rank and line under `launch`",
        _frameworks,
        ("frameworks.md",), "make soak-frameworks",
    ),
    Claim(
        "silent faults in unchanged scripts of DDP, Accelerate, Trainer",
        _silent,
        ("silent.md",), "make soak-silent",
    ),
    Claim(
        "pitfalls planted in scripts under `launch --check`",
        lambda text: "{} of {}; {} findings in {} correct scripts".format(
            *numbers(r"(\d+) of (\d+) planted pitfalls found.*?; (\d+) findings in (\d+) scripts", text)
        ),
        ("check.md",), "make soak-check",
    ),
    Claim(
        "eight sets of faults and pitfalls that others wrote, at first run; the checks were changed after each set",
        _second,
        tuple(f"second-{name}.md" for name in SETS),
        "make soak-second",
    ),
    Claim(
        "an hour of harmless disturbances: alarms",
        lambda record: f"{sum(record['alarms'].values())} in {record['stops']} pauses and "
        f"{sum(record['scenes'].values())} scripts that resemble a fault",
        ("quiet.json",), "make soak-quiet",
    ),
    Claim(
        "LoRA on three models, killed and resumed: largest difference from a plain loop",
        lambda record: f"{max(one['weights'] for one in record['cases'].values()):.1e} in {len(record['cases'])} runs, "
        f"{sum(bool(one['problems']) for one in record['cases'].values())} problems",
        ("lora.json",), "make soak-lora",
    ),
    Claim(
        "scripts under torchrun and under `paceline launch`",
        lambda rows: f"{sum(row['same'] for row in rows)} of {len(rows)} equal, "
        f"{sum(bool(row['known']) and not row['same'] for row in rows)} documented differences",
        ("same.json",), "make soak-same",
    ),
    Claim(
        "causes of lost time that were injected: named by `paceline scale`",
        _named,
        ("scale.json",),
        "python benchmarks/scale_causes.py",
    ),
    Claim(
        "generated stalls: wrong reports", lambda record: f"{len(record['wrong'])} of {record['count']:,}",
        ("judge.json",), "make soak-judge",
    ),
    Claim(
        "step time of four DDP scripts with the hooks of `paceline launch`, without = 1",
        lambda record: ", ".join(f"{record[work]['ratio']:.3f}" for work in ("W1", "W2", "W3", "W3g")),
        ("probe.json",), "python benchmarks/probe.py",
    ),
    Claim("the coordinator of many nodes (simulated workers)", _thousand, ("thousand.json",), "make bench-thousand"),
    Claim(
        "connections of a third machine to each port of a run: step time, without = 1",
        lambda record: f"{record['ratio_median']:.2f}; {len(record['failed'])} failures", ("strangers.json",),
        "make soak-strangers",
    ),
)  # fmt: skip


def recorded(records: Iterable[str]) -> str:
    """The newest date on which one of the records was committed, and the commit; any with --check.

    It is the first commit with the present content: a file that was removed and restored keeps its date.
    """
    if CHECK:
        return "2026-01-01, 1234567"
    dates = (_first_commit(str((RESULTS / record).relative_to(ROOT))) for record in records)
    return max(dates)[len("1234567890 ") :]


def _first_commit(file: str) -> str:
    """The time, date and hash of the first commit with the present content of a file."""
    content = subprocess.run(
        ["git", "rev-parse", f"HEAD:{file}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    commits = subprocess.run(
        ["git", "log", "--reverse", f"--find-object={content}", "--format=%ct %as, %H", "--", file],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return commits[0][: len("1234567890 2026-01-01, 1234567")]


def claims() -> str:
    """All rows."""
    rows = list[str]()
    for claim in CLAIMS:
        said = claim.measured(*map(read, claim.records))
        links = ", ".join(f"[{n}](../benchmarks/results/{name})" for n, name in enumerate(claim.records, 1))
        links = links if len(claim.records) > 1 else links.replace("[1]", f"[{claim.records[0]}]")
        rows.append(f"| {claim.what} | {said} | {links} | `{claim.command}` | {recorded(claim.records)} |\n")
    return HEAD + "".join(rows)


def goals() -> str:
    """What benchmarks/summary.py says of the records, and when these were made."""
    command = [sys.executable, str(ROOT / "benchmarks" / "summary.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    dates = "".join(f"- [{name}](../benchmarks/results/{name}): {recorded([name])}\n" for name in GOALS_FROM)
    return f"{said.strip()}\n\nRecorded on:\n\n{dates}"


def main() -> int:
    """Write the tables, or compare them with the page."""
    text = PAGE.read_text()
    made = {"goals": goals, "records": claims}
    assert {place[1] for place in TABLE.findall(text)} == {*made}, f"{PAGE} has no place for the records"
    new = TABLE.sub(lambda place: f"{place[1]}\n{made[place[2]]()}\n{place[4]}", text)
    if not CHECK:
        PAGE.write_text(new)
    elif DATE.sub("", new) != DATE.sub("", text):
        print(f"{PAGE.relative_to(ROOT)} differs from the records: python tools/measured.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
