"""Measures every candidate once in each round, A B C A B C, each time in new processes.

A round starts one set of processes for each world size. The candidates take turns in it, in an order that is rotated
in each round. Other load on the machine therefore affects all candidates equally, and their ratios within a round are
fair. A candidate that fails ends its set. The set is started again for the remaining candidates.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline.config.mesh import format_strategy
from paceline.errors import ExitCode, plural
from paceline.lab import measurement as m
from paceline.launch.supervise import run_workers
from paceline.protocol.control import STOP_SIGNALS
from paceline.protocol.evidence import Failure
from paceline.runs.console import print_to_stderr

WORKER = "paceline.lab.ranks.measure"
QUIET_ENV = {"KINETO_LOG_LEVEL": "99"}  # otherwise the profiler prints several lines at each start
MAX_REASON_CHARS = 300


CandidateGroups = Mapping[int, Sequence[m.Candidate]]  # by number of processes


@dataclass
class MeasuredRounds:
    rounds: list[list[m.Measurement]] = field(default_factory=list[list[m.Measurement]])
    failures: list[m.FailedMeasurement] = field(default_factory=list[m.FailedMeasurement])
    code: int = ExitCode.DONE  # not 0: measuring ended early, for a reason that has been printed

    def notes(self) -> list[str]:
        measured = [chunk for chunks in self.rounds for chunk in chunks]
        slow_reasons: dict[tuple[int, int], list[str]] = {}
        for chunk in measured:
            for rank, reason in chunk.gpus.items():
                slow_reasons.setdefault((chunk.world_size, rank), []).append(reason)
        times = Counter(chunk.world_size for chunk in measured)
        slow_gpus = [
            f"rank {rank} of {size}, in {len(reasons)} of {times[size]} measurements: its {reasons[0]}"
            for (size, rank), reasons in sorted(slow_reasons.items())
        ]
        return [*dict.fromkeys(note for chunk in measured for note in chunk.notes), *slow_gpus]


def candidate_dir(root: Path, number: int, nproc: int, name: str = "") -> Path:
    """The folder of a candidate's events in round `number` (from 0); without a name, that of its set."""
    return root / f"round-{number}" / f"ranks-{nproc}" / name


def measure_rounds(
    groups: CandidateGroups, settings: str, root: Path, *, rounds: int, warmup: int, steps: int, memory: bool
) -> MeasuredRounds:
    """Measure all groups in each round, memory in the first one only. `settings`: of the training, as TOML."""
    results = MeasuredRounds()
    for number in range(rounds):
        results.rounds.append([])
        for nproc, candidates in groups.items():
            print_to_stderr(f"round {number + 1} of {rounds}: {plural(nproc, 'process', 'processes')} ...")
            shift = number % max(1, len(candidates))
            failed = {failure.name for failure in results.failures if failure.world_size == nproc}
            rotated = [*candidates[shift:], *candidates[:shift]]
            remaining = [candidate for candidate in rotated if candidate.name not in failed]
            folder = candidate_dir(root, number, nproc)
            order = m.MeasurementRequest(remaining, warmup, steps, str(folder), time.time(), memory and number == 0)
            _measure_set(results, order, settings, nproc)
            if results.code != ExitCode.DONE:
                return results
    return results


def _measure_set(results: MeasuredRounds, order: m.MeasurementRequest, settings: str, nproc: int) -> None:
    remaining, folder = order.candidates, Path(order.folder)
    while remaining:
        if folder.exists():  # a candidate has failed: keep the events of its set
            folder = Path(f"{order.folder}-again-{len(remaining)}")
        new_order = msgspec.structs.replace(order, candidates=remaining, folder=str(folder), started_unix=time.time())
        code = _start_set(new_order, settings, nproc)
        measured = _read_measurements(folder)
        results.rounds[-1].extend(measured)
        if code == ExitCode.DONE:
            return
        running = folder / m.RUNNING
        if code - 128 in {*STOP_SIGNALS} or not running.is_file():
            results.code = code
            return
        failed = msgspec.json.decode(running.read_bytes(), type=m.Candidate)
        reason = _failure_reason(folder / "attempt", code)
        failure = m.FailedMeasurement(failed.name, failed.strategy, nproc, failed.batch_size, reason, failed.mesh)
        results.failures.append(failure)
        print_to_stderr(f"{format_strategy(failed.strategy, failed.mesh)} failed; measuring the other candidates")
        done = {failed.name, *(measurement.candidate.name for measurement in measured)}
        remaining = [candidate for candidate in remaining if candidate.name not in done]


def _start_set(order: m.MeasurementRequest, settings: str, nproc: int) -> int:
    folder = Path(order.folder)
    folder.mkdir(parents=True)
    (folder / m.CONFIG).write_text(settings)
    (folder / m.ORDER).write_bytes(msgspec.json.encode(order))
    threads = max(candidate.threads for candidate in order.candidates)
    return run_workers(WORKER, [str(folder)], folder / "attempt", nproc, threads, env=QUIET_ENV)


def _read_measurements(folder: Path) -> list[m.Measurement]:
    path = folder / m.CHUNKS
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [msgspec.json.decode(line, type=m.Measurement) for line in lines if line.endswith(b"}")]


def _failure_reason(attempt: Path, code: int) -> str:
    failures = [msgspec.json.decode(path.read_bytes(), type=Failure) for path in sorted(attempt.glob("error-*.json"))]
    causes = [failure for failure in failures if not failure.victim] or failures
    if causes:
        first = min(causes, key=lambda failure: failure.monotonic_seconds)
        lines = first.message.strip().splitlines() or [first.type]
        rank = "" if first.exit_code == ExitCode.USAGE else f"rank {first.rank}: {first.type}: "
        return f"{rank}{lines[0]}"[:MAX_REASON_CHARS]
    return f"its processes ended with code {code}" + (" (killed; out of memory?)" if code == 137 else "")
