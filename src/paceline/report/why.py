"""Why a run was as fast as it was, in words, with the shares that the words rest on.

    step = computing + waiting for data + waiting for the slowest rank + exchange + between steps + rest

as `paceline scale` takes steps apart (bench/shares.py), here of one run alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.bench.runs import Run, Spent, between_meetings
from paceline.bench.shares import StepParts, take_apart
from paceline.report.happened import wall
from paceline.report.run import PHASES, RankLog, WholeRun, thinned

WARM_UP, MOST_STEPS, MOST_SPENT = 5, 1000, 200_000
NAMED = 0.08  # of a step: waiting for less blames nobody
WORTH = 0.03  # of a step: less is not worth a word
MUCH, LONG_SECONDS = 0.15, 20.0  # of the clock's time, in a run that is not over at once
CROWDED = 1.25  # threads for each core, from which on they are in each other's way
LITTLE = 0.75  # of the processor time that the others get
COMPUTING, DATA, WAITING, EXCHANGE = "computing", "waiting for data", "waiting for the slowest rank", "the exchange"
BETWEEN, REST = "between steps", "not explained"
BESIDE = {  # remedies for what takes long beside steps
    "evaluations": "Evaluate less often, or on fewer samples: --eval-every STEPS",
    "checkpoints": "Save less often: --checkpoint-every 10min",
}
PLAIN = {  # a cause in words, and its remedy
    DATA: ("was waiting for data, on every rank", "Read ahead in other processes: --num-workers 2 (docs/speed.md)"),
    BETWEEN: ("was between steps (logging, checks)", "Log and record less often: --log-interval, --record-samples"),
    REST: ("is not explained", ""),
}


@dataclass(frozen=True)
class Why:
    """What held a run up."""

    first: str
    """one sentence: how much of their time the ranks worked, and what took most of the rest"""
    advice: list[str] = field(default_factory=list[str])
    """what to try, the most promising first"""
    shares: dict[str, float] = field(default_factory=dict[str, float])
    """of a step's time, by cause; together 1"""
    slowest: int | None = None
    slow_phase: str = ""
    """in which the slowest rank loses most"""
    waits: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    """who waited for whom: seconds in all steps looked at, by the rank that waited and the one it waited for"""


def why(run: WholeRun) -> Why:
    """Judge a run by its newest start."""
    logs = [log for log in run.latest() if log.rows]
    size = run.world_size
    if not logs:
        return Why("No step was written down, so nothing can be said of its speed.")
    if len(logs) < size:
        return Why(f"Only {len(logs)} of {size} ranks have written down steps: what they waited for cannot be told.")
    steps = _common_steps(logs)
    if len(steps) < 2:
        return Why(f"Too few steps to judge its speed by: the first {WARM_UP} are warm-up.")
    spent = Run(steps=steps, samples=1.0, hosts=run.hosts)
    parts, between = take_apart(spent), sum(s.between for one in steps for s in one.values()) / len(steps) / size
    total = parts.step or 1e-9
    shares = {
        COMPUTING: max(0.0, parts.compute - between), DATA: parts.data, WAITING: max(0.0, parts.waiting),
        EXCHANGE: parts.exchange if size > 1 else 0.0, BETWEEN: between,
    }  # fmt: skip
    shares = {cause: seconds / total for cause, seconds in shares.items()}
    shares[REST] = 1.0 - sum(shares.values())
    first, advice = _in_words(run, parts, shares, logs)
    beside, more = _beside_steps(run)
    first, advice = first + beside, advice + more
    return Why(first, advice, shares, parts.slowest, parts.slow_phase, _waits(steps))


def _common_steps(logs: Sequence[RankLog]) -> list[dict[int, Spent]]:
    """Steps that all ranks of the newest start have, without warm-up and without what stood beside them; not all."""
    start = logs[0].started[-1].start_step
    rows = [{log.steps.step[row]: row for row in log.rows if log.steps.step[row] > start + WARM_UP} for log in logs]
    common = sorted(set(rows[0]).intersection(*rows[1:]))
    common = [n for n in common if all(log.steps.follows[of[n]] for log, of in zip(logs, rows, strict=True))] or common
    return [
        {log.rank: _spent(log, of[number]) for log, of in zip(logs, rows, strict=True)}
        for number in thinned(common, min(MOST_STEPS, MOST_SPENT // len(logs)))
    ]


def _spent(log: RankLog, row: int) -> Spent:
    steps = log.steps
    phases = {name: column[row] for name, column in zip(PHASES, steps.phases, strict=True)}
    if not row or not steps.follows[row]:
        return Spent(**phases, seconds=steps.seconds[row])
    between = steps.ended[row] - steps.ended[row - 1] - steps.seconds[row]
    return between_meetings(phases, steps.seconds[row], between, steps.phases[-1][row - 1])


def _waits(steps: Sequence[dict[int, Spent]]) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for one in steps:
        work = {r: s.data + s.forward + s.backward + s.optimizer + s.between for r, s in one.items()}
        slowest = max(work, key=lambda rank: work[rank])
        for rank, seconds in work.items():
            if rank != slowest:
                of = found.setdefault(rank, {})
                of[slowest] = of.get(slowest, 0.0) + work[slowest] - seconds
    return found


def _in_words(
    run: WholeRun, parts: StepParts, shares: dict[str, float], logs: Sequence[RankLog]
) -> tuple[str, list[str]]:
    size, advice = len(logs), list[str]()
    worked = shares[COMPUTING]
    lost = sorted(((share, cause) for cause, share in shares.items() if cause != COMPUTING), reverse=True)
    causes: list[str] = []
    for share, cause in lost:
        if share >= WORTH:
            words, remedy = _cause(run, cause, share, parts, logs)
            causes.append(f"{share:.0%} {words}")
            advice += [f"{remedy} (up to {share:.0%} of the time)"] if remedy else []
    lead = f"{worked:.0%} of each step was computing"
    lead += f", so {size} ranks did the work of {size * worked:.1f}" if size > 1 else ""
    told = f"{lead}; {_joined(causes)}." if causes else f"{lead}."
    crowd, threads, crowded = crowding(run)
    if crowd < CROWDED:
        return told, advice
    if threads == 1:  # it may be meant so
        return f"{told} {crowded}.", [*advice, "Fewer ranks, or more cores"]
    fewer = "Fewer threads for each rank: leave out --threads-per-rank, or give 1"
    return f"{crowded}, so they slow each other down. {told}", [fewer, *advice]


def _beside_steps(run: WholeRun) -> tuple[str, list[str]]:
    """What took much of the clock's time beside steps, and what to do about it."""
    found = {name: seconds for name, seconds in wall(run).items() if name != "steps"}
    total = sum(wall(run).values())
    if not total > LONG_SECONDS:
        return "", []
    much = {name: seconds / total for name, seconds in found.items() if seconds > MUCH * total}
    words = _joined([f"{share:.0%} went to {name}" for name, share in much.items()]) if much else ""
    return f" Of the whole time {words}." if words else "", [BESIDE[name] for name in much if name in BESIDE]


def _joined(causes: Sequence[str]) -> str:
    return causes[0] if len(causes) == 1 else f"{', '.join(causes[:-1])} and {causes[-1]}"


def _cause(run: WholeRun, cause: str, share: float, parts: StepParts, logs: Sequence[RankLog]) -> tuple[str, str]:
    rank, hosts = parts.slowest, {*run.hosts.values()}
    where = f" on {run.hosts[rank]}" if rank is not None and len(hosts) > 1 else ""
    if cause == EXCHANGE:
        return _exchange(run, parts)
    if cause != WAITING:
        return PLAIN[cause]
    if rank is None or (share < NAMED and parts.slow_phase != "data"):
        return "was waiting for each other, for no rank in particular", ""
    if parts.slow_phase == "data":
        return (
            f"was waiting for rank {rank}'s data{where}",
            f"Rank {rank}'s data come late{where}: compare its files and disk with the others', keep them in "
            "memory, or read ahead with --num-workers 2",
        )
    phase = f" in {parts.slow_phase}" if parts.slow_phase not in ("", "between") else ""
    words = f"was waiting for rank {rank}{where}, which is slower than the others{phase}{_held_back(run, rank, logs)}"
    return words, f"Look at what else runs beside rank {rank}{where}: paceline monitor"


def _exchange(run: WholeRun, parts: StepParts) -> tuple[str, str]:
    hosts, sent = sorted({*run.hosts.values()}), sent_bytes(run)
    speed = f" ({sent / 1e6:,.1f} MB of gradients in {1e3 * parts.exchange:,.0f} ms)" if sent and parts.exchange else ""
    fewer = "Larger batches or --accumulation: fewer exchanges for as many samples"
    if len(hosts) == 1:
        return f"was the exchange{speed}", fewer
    between = f"between {hosts[0]} and {hosts[1]}" if len(hosts) == 2 else f"between {len(hosts)} hosts"
    return (
        f"was the exchange {between}{speed}",
        f"{fewer}; or a faster network: paceline scale --network says what it brings",
    )


def sent_bytes(run: WholeRun) -> int:
    """What the gradients of a step are, in bytes; 0 where nobody has said."""
    anatomy = run.first.anatomy if run.first else None
    return anatomy.gradient_bytes if anatomy else 0


def _held_back(run: WholeRun, rank: int, logs: Sequence[RankLog]) -> str:
    """What the machine's records say of a rank that is slow."""
    got: dict[int, float] = {}
    for log in logs:
        used = [one.ranks[log.rank].cores for found in run.machines.values() for one in found if log.rank in one.ranks]
        if used:
            got[log.rank] = median(used)
    others = [cores for other, cores in got.items() if other != rank]
    if rank in got and others and got[rank] < LITTLE * median(others):
        return f": it got {got[rank]:.1f} of a core, the others {median(others):.1f}"
    troubles = {gpu.held_back for found in run.machines.values() for one in found[-60:] for gpu in one.gpus}
    return f": a GPU is {min(troubles - {''})}" if troubles - {""} else ""


def crowding(run: WholeRun) -> tuple[float, int, str]:
    """Threads for each core on the fullest host, those of a rank, and that in words; 0 where it is not known."""
    told = run.summary.threads_per_rank if run.summary else run.environment.get("threads_per_rank")
    threads = told if isinstance(told, int) else 0
    cores = {one.host: one.cores for found in run.machines.values() for one in found[-1:]}
    most, words = 0.0, ""
    for host, count in cores.items():
        ranks = sum(1 for other in run.hosts.values() if other == host)
        if count and threads * ranks / count > most:
            most = threads * ranks / count
            words = f"{threads * ranks} threads compete for {count} cores{f' on {host}' if len(cores) > 1 else ''}"
    return most, threads, words
