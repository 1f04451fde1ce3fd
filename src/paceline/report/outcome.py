"""The outcome of a run: its events, whether its loss fell, its failures, and its bottleneck."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.errors import ExitCode
from paceline.report import step_parts
from paceline.report.figures import COLOURS, Figure
from paceline.report.run import RankEvents, RunData, pick_evenly
from paceline.report.step_parts import PhaseSeconds, StepParts
from paceline.runs.console import remove_control_characters
from paceline.runs.events import Checkpointed, Ended, Evaluated, Notice, RolledBack, Skipped
from paceline.runs.summary import format_metrics

MIN_TIMELINE_SECONDS = 2.0  # a shorter run has no timeline
MAX_MARKS = 256  # of a kind
MIN_TREND_STEPS = 10  # with fewer, the trend of the loss is unknown
FALLING_LOSS_RATIO = 0.98  # the loss falls if it ends below this fraction of the first loss
REMEDIES = {
    ExitCode.NOT_FINITE: "The learning rate was {lr:g}: try a lower one or --clip-norm 1, or check the reported "
    "samples. To skip such steps, use --not-finite skip",
    ExitCode.STALLED: "See the diagnosis below, which names the rank and its line",
    ExitCode.MISMATCH: "Ranks called different collectives: see the diagnosis below, which names the lines",
    ExitCode.DIVERGED: "Replicas diverged: check the node that is named below, its memory first",
}
WARM_UP, MAX_STEPS, MAX_SPENT = 5, 1000, 200_000
MIN_WAIT = 0.08  # fraction of a step: a shorter wait names no rank
MIN_SHARE = 0.03  # fraction of a step: a smaller cause is not mentioned
MIN_WALL_SHARE, MIN_WALL_SECONDS = 0.15, 20.0  # a fraction of the wall time that is mentioned, in runs of this duration
CROWDED_THREADS_PER_CORE = 1.25  # threads per core that slow each other down
LOW_CPU = 0.75  # fraction of the processor time of the other ranks
COMPUTING, DATA, WAITING, EXCHANGE = "computing", "waiting for data", "waiting for the slowest rank", "the exchange"
BETWEEN, REST = "between steps", "not explained"
WALL_TIME_REMEDIES = {
    "evaluations": "Evaluate less often, or on fewer samples: --eval-every STEPS",
    "checkpoints": "Save less often: --checkpoint-every 10min",
}
CAUSES = {  # a description of each cause, and its remedy
    DATA: ("was waiting for data, on every rank", "Prefetch in other processes: --num-workers 2 (docs/speed.md)"),
    BETWEEN: ("was between steps (logging, checks)", "Log and record less often: --log-interval, --record-samples"),
    REST: ("is not explained", ""),
}


def run_events(run: RunData) -> list[tuple[float, str, str]]:
    """The events of a run except steps, in order: seconds since the beginning, kind, description."""
    first = run.first_rank_log
    began = first.start_events[0].unix_time if first else min(
        (record.unix_time for record in (*run.diagnoses, *run.notices)), default=0.0)  # fmt: skip
    events: list[tuple[float, str, str]] = []  # Unix time, kind, description
    for number, start in enumerate(first.start_events if first else ()):
        kind = "start" if not number else "restart" if start.generation else "resume"
        action = f"resume after step {start.start_step:,}" if start.start_step else "start"
        events.append((start.unix_time, kind, f"{start.world_size} ranks {action}"))
    for at, event in first.events if first else ():
        match event:
            case Checkpointed():
                text = f"after step {event.step:,}: {event.failure or f'{event.size_bytes / 1e6:,.1f} MB'}"
                events.append((at, "checkpoint failed" if event.failure else "checkpoint", text))
            case Evaluated():
                scores = ", ".join(f"{name} {score:.4g}" for name, score in event.metrics.items())
                events.append((at, "evaluation", f"{event.split} after step {event.step:,}: {scores}"))
            case Skipped():
                events.append((at, "skipped step", f"step {event.step:,}: {event.reason}"))
            case RolledBack():
                events.append((at, "rollback", f"from step {event.step:,} to {event.to:,}"))
            case Notice():
                events.append((at, "notice", event.text))
            case _:
                pass
    last = max((at for at, _, _ in events), default=began)
    events += [(last, "failed", f"{rank}: {error}") for rank, error in root_failures(run)]
    events += [(record.unix_time, "diagnosis", " ".join(record.diagnosis.sentences)) for record in run.diagnoses]
    events += [(notice.unix_time, "finding", notice.words) for notice in run.notices]
    ended = [at for at, event in first.events if isinstance(event, Ended)] if first else []
    if ended and run.newest_start and ended[-1] >= run.newest_start.unix_time:
        events.append((ended[-1], "end", run.state or "ended"))
    return [
        (at - began, kind, remove_control_characters(text)[:400])
        for at, kind, text in sorted(events, key=lambda event: event[0])
    ]


def timeline_figures(events: Sequence[tuple[float, str, str]]) -> Iterable[Figure]:
    of_kind: dict[str, list[tuple[float, str]]] = {}
    for at, kind, text in events:
        if kind != "notice":
            of_kind.setdefault(kind, []).append((at, text))
    traces = [
        {"name": kind, "colour": COLOURS[number % len(COLOURS)], "marks": number,
         "x0": [round(at / 60, 3) for at, _ in marks[:MAX_MARKS]], "y": [kind] * min(MAX_MARKS, len(marks)),
         "text": [text[:120] for _, text in marks[:MAX_MARKS]]}
        for number, (kind, marks) in enumerate(of_kind.items())
    ]  # fmt: skip
    if len(traces) > 1 and max(at for at, _, _ in events) > MIN_TIMELINE_SECONDS:
        yield Figure("timeline", "What happened when", "Starts, checkpoints, evaluations and failures.", traces,
                     x="minutes", kind="marks")  # fmt: skip


def wall_seconds_by_use(run: RunData) -> dict[str, float]:
    if not (first := run.first_rank_log) or not first.valid_rows:
        return {}
    steps, started = first.steps, first.start_events
    last = max(steps.ended[first.valid_rows[-1]], *(at for at, _ in first.events[-50:] or [(0.0, None)]))
    total, kept = last - started[0].unix_time, sum(steps.seconds[row] for row in first.valid_rows)
    discarded = sum(steps.seconds) - kept
    evaluated = sum(event.seconds for _, event in first.events_of(Evaluated))
    stalls = sum(event.stall_seconds for _, event in first.events_of(Checkpointed))
    gaps = first.idle_seconds
    rest = total - kept - discarded - evaluated - stalls - gaps
    return {"steps": kept, "evaluations": evaluated, "checkpoints": stalls, "discarded steps": discarded,
            "time between two starts": gaps, "start-up and other": max(0.0, rest)}  # fmt: skip


def learning_summary(run: RunData) -> str:
    if not (first := run.first_rank_log) or not first.valid_rows:
        return ""
    losses = [loss for row in first.valid_rows if math.isfinite(loss := first.steps.loss[row])]
    scores = run.summary.test_metrics if run.summary else None
    reached = f"; test {format_metrics(scores)}" if scores else ""
    if len(losses) < MIN_TREND_STEPS:
        return f"Training loss {losses[-1]:.4g} after {len(first.valid_rows)} steps{reached}." if losses else ""
    tenth = max(3, len(losses) // 10)
    before, after = median(losses[:tenth]), median(losses[-tenth:])
    trend = "" if after < FALLING_LOSS_RATIO * before else ": it did not fall"
    return f"Training loss {before:.4g} to {after:.4g} in {len(first.valid_rows):,} steps{trend}{reached}."


def restart_summary(run: RunData) -> str:
    again = run.first_rank_log.start_events[1:] if run.first_rank_log else []
    if not again:
        return ""
    steps = ", ".join(f"{start.start_step:,}" for start in again[:5])
    times = "once" if len(again) == 1 else f"{len(again)} times"
    return f"It was restarted {times}, and resumed after step {steps}."


def root_failures(run: RunData) -> list[tuple[str, str]]:
    causes = [failure for failure in run.failures if not failure.victim] or run.failures
    return [
        (f"rank {f.rank} ({remove_control_characters(f.host)})", remove_control_characters(f.message or f.type))
        for f in causes[:20]
    ]


def failure_remedies(run: RunData) -> list[str]:
    code = run.failures[0].exit_code if run.failures else run.summary.exit if run.summary else 0
    text = REMEDIES.get(ExitCode(code)) if code in {*ExitCode} else None
    if text is None:
        failed = run.state in ("failed", "lost")
        return [f"See the last output of the ranks: paceline logs {run.name}"] if failed else []
    rates = run.first_rank_log.steps.lr if run.first_rank_log else None
    return [text.format(lr=rates[-1] if rates else math.nan)]


@dataclass(frozen=True)
class Bottleneck:
    summary: str  # a sentence: the fraction of the time in which ranks computed, and the largest causes of the rest
    advice: list[str] = field(default_factory=list[str])  # advice, the most promising first
    cause_fractions: dict[str, float] = field(default_factory=dict[str, float])
    """The fraction of a step's time, by cause. Their sum is 1."""
    parts: StepParts | None = None


def find_bottleneck(run: RunData) -> Bottleneck:
    logs = [log for log in run.newest_rank_logs() if log.valid_rows]
    size = run.world_size
    if not logs:
        return Bottleneck("The run has recorded no steps, so its speed is unknown.")
    if len(logs) < size:
        recorded = f"Only {len(logs)} of {size} ranks have recorded steps"
        return Bottleneck(f"{recorded}, so the causes of waiting are unknown.")
    steps = _common_steps(logs)
    if len(steps) < 2:
        return Bottleneck(f"Too few steps to analyze its speed: the first {WARM_UP} are warm-up.")
    spent = step_parts.RecordedSteps(steps=steps, mean_global_batch=1.0, hosts=run.hosts)
    parts = step_parts.split_step_time(spent)
    between = sum(s.between for step in steps for s in step.values()) / len(steps) / size
    total = parts.step or 1e-9
    shares = {
        COMPUTING: max(0.0, parts.compute - between), DATA: parts.data, WAITING: max(0.0, parts.waiting),
        EXCHANGE: parts.exchange if size > 1 else 0.0, BETWEEN: between,
    }  # fmt: skip
    shares = {cause: seconds / total for cause, seconds in shares.items()}
    shares[REST] = 1.0 - sum(shares.values())
    first, advice = _step_summary(run, parts, shares, logs)
    second, more_advice = _wall_time_summary(run)
    return Bottleneck(first + second, advice + more_advice, shares, parts)


def _common_steps(logs: Sequence[RankEvents]) -> list[dict[int, PhaseSeconds]]:
    """Some steps that all ranks of the newest start have recorded after the warm-up, if possible consecutive ones."""
    rows = step_parts.rows_by_common_step(logs, logs[0].start_events[-1].start_step + WARM_UP)
    follow = [n for n, of in rows.items() if all(log.steps.follows[row] for log, row in zip(logs, of, strict=True))]
    numbers = pick_evenly(follow or [*rows], min(MAX_STEPS, MAX_SPENT // len(logs)))
    return [step_parts.phase_seconds_by_rank(logs, rows[number]) for number in numbers]


def _step_summary(
    run: RunData, parts: StepParts, shares: dict[str, float], logs: Sequence[RankEvents]
) -> tuple[str, list[str]]:
    size, computing_share, causes, advice = len(logs), shares[COMPUTING], list[str](), list[str]()
    for share, cause in sorted(((share, cause) for cause, share in shares.items() if cause != COMPUTING), reverse=True):
        if share >= MIN_SHARE:
            description, remedy = _cause(run, cause, share, parts, logs)
            causes.append(f"{share:.0%} {description}")
            advice += [f"{remedy} (up to {share:.0%} of the time)"] if remedy else []
    sentence = f"{computing_share:.0%} of each step was computing"
    sentence += f", so {size} ranks did the work of {size * computing_share:.1f}" if size > 1 else ""
    sentence += f"; {_joined(causes)}." if causes else "."
    load, threads, crowded = thread_oversubscription(run)
    if load < CROWDED_THREADS_PER_CORE:
        return sentence, advice
    if threads == 1:  # may be intended
        return f"{sentence} {crowded}.", [*advice, "Use fewer ranks, or more cores"]
    fewer = "Use fewer threads per rank: omit --threads-per-rank, or set it to 1"
    return f"{crowded}, so they slow each other down. {sentence}", [fewer, *advice]


def _wall_time_summary(run: RunData) -> tuple[str, list[str]]:
    spent = wall_seconds_by_use(run)
    total = sum(spent.values())
    limit = MIN_WALL_SHARE * total
    large = {name: seconds / total for name, seconds in spent.items() if name != "steps" and seconds > limit}
    if not large or not total > MIN_WALL_SECONDS:
        return "", []
    uses = _joined([f"{name} took {share:.0%}" for name, share in large.items()])
    advice = [WALL_TIME_REMEDIES[name] for name in large if name in WALL_TIME_REMEDIES]
    return f" {uses[0].upper()}{uses[1:]} of the whole time.", advice


def _joined(causes: Sequence[str]) -> str:
    return causes[0] if len(causes) == 1 else f"{', '.join(causes[:-1])} and {causes[-1]}"


def _cause(run: RunData, cause: str, share: float, parts: StepParts, logs: Sequence[RankEvents]) -> tuple[str, str]:
    rank, hosts = parts.slowest, {*run.hosts.values()}
    where = f" on {run.hosts[rank]}" if rank is not None and len(hosts) > 1 else ""
    if cause == EXCHANGE:
        return _describe_exchange(run, parts)
    if cause != WAITING:
        return CAUSES[cause]
    if rank is None or (share < MIN_WAIT and parts.slow_phase != "data"):
        return "was waiting for each other, for no rank in particular", ""
    if parts.slow_phase == "data":
        return (
            f"was waiting for rank {rank}'s data{where}",
            f"The data of rank {rank}{where} are late: compare its files and disk with those of other ranks, keep "
            "the data in memory, or prefetch with --num-workers 2",
        )
    phase = f" in {parts.slow_phase}" if parts.slow_phase not in ("", "between") else ""
    description = f"was waiting for rank {rank}{where}, which is slower than the others{phase}"
    remedy = f"Check which other programs run on the node of rank {rank}{where}: paceline monitor"
    return f"{description}{_slow_reason(run, rank, logs)}", remedy


def _describe_exchange(run: RunData, parts: StepParts) -> tuple[str, str]:
    hosts, sent = sorted({*run.hosts.values()}), gradient_bytes_per_rank(run)
    speed = f" ({sent / 1e6:,.1f} MB of gradients in {1e3 * parts.exchange:,.0f} ms)" if sent and parts.exchange else ""
    fewer = "Use larger batches or --accumulation, for fewer exchanges with the same number of samples"
    if len(hosts) == 1:
        return f"was the exchange{speed}", fewer
    between = f"between {hosts[0]} and {hosts[1]}" if len(hosts) == 2 else f"between {len(hosts)} hosts"
    return (
        f"was the exchange {between}{speed}",
        f"{fewer}; or use a faster network: paceline scale --network estimates the gain",
    )


def gradient_bytes_per_rank(run: RunData) -> int:
    memory = run.first_rank_log.memory if run.first_rank_log else None
    return memory.gradient_bytes if memory else 0


def _slow_reason(run: RunData, rank: int, logs: Sequence[RankEvents]) -> str:
    records = [record for of_node in run.machines.values() for record in of_node]
    cores = {log.rank: [record.ranks[log.rank].cores for record in records if log.rank in record.ranks] for log in logs}
    got = {other: median(used) for other, used in cores.items() if used}
    others = [used for other, used in got.items() if other != rank]
    if rank in got and others and got[rank] < LOW_CPU * median(others):
        return f": it got {got[rank]:.1f} of a core, the others {median(others):.1f}"
    newest = [record for of_node in run.machines.values() for record in of_node[-60:]]
    reasons = {gpu.held_back for record in newest for gpu in record.gpus} - {""}
    return f": a GPU is {min(reasons)}" if reasons else ""


def thread_oversubscription(run: RunData) -> tuple[float, int, str]:
    """Threads per core on the host with the most, threads per rank, and a sentence; 0: unknown."""
    threads_per_rank = run.summary.threads_per_rank if run.summary else run.environment.get("threads_per_rank")
    threads = threads_per_rank if isinstance(threads_per_rank, int) else 0
    cores = {record.host: record.cores for records in run.machines.values() for record in records[-1:]}
    ranks = Counter(run.hosts.values())
    loads = {host: threads * ranks[host] / count for host, count in cores.items() if count}
    host = max(loads, key=lambda host: loads[host], default="")
    if not loads.get(host, 0.0) > 0:
        return 0.0, threads, ""
    on = f" on {host}" if len(cores) > 1 else ""
    return loads[host], threads, f"{threads * ranks[host]} threads compete for {cores[host]} cores{on}"
