"""Run folders as ranks would have written them, in which one thing is slow, or hostile."""

from pathlib import Path

import msgspec

from paceline.runs.events import Ended, MemoryBreakdown, Notice, Started, Step, TracedStep
from paceline.runs.machine import MachineUse, RankUse
from paceline.runs.writers import EventWriter

USUAL = {"data": 0.001, "forward": 0.010, "backward": 0.020, "optimizer": 0.002}


def make_run(
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = 40,
    slow: dict[int, dict[str, float]] | None = None,
    exchange: float = 0.001,
    hosts: tuple[str, ...] = ("n1",),
    threads: int = 1,
    cores: float = 8,
    rank_cores: dict[int, float] | None = None,
    strategy: str = "exact",
    notices: tuple[str, ...] = (),
    seed: int = 0,
) -> Path:
    """A run that is done: in lockstep, each step as long as its slowest rank works, and then the exchange.

    Args:
        folder: to be made.
        ranks: how many.
        steps: how many.
        slow: by rank, the phases that take longer than usual there, in seconds.
        exchange: seconds of each step.
        hosts: dealt to the ranks in turn.
        threads: of each rank.
        cores: of each host.
        rank_cores: how much of a core each rank's process got.
        strategy: its name.
        notices: that rank 0 has shown.
        seed: in the settings.
    """
    folder.mkdir(parents=True, mode=0o700)
    (folder / "attempt-1").mkdir(mode=0o700)
    (folder / "config.toml").write_text(
        f'task = "mnist-cnn"\nstrategy = "{strategy}"\n[run]\nepochs = 1\nseed = {seed}\n'
    )
    (folder / "environment.json").write_text(f'{{"torch": "2.13.0", "threads_per_rank": {threads}}}')
    spent = {rank: {**USUAL, **(slow or {}).get(rank, {})} for rank in range(ranks)}
    work = {rank: sum(phases.values()) for rank, phases in spent.items()}
    lasts = max(work.values()) + exchange
    for rank in range(ranks):
        with EventWriter(folder / f"events-{rank}.jsonl") as writer:
            writer.write(Started(1, rank, ranks, hosts[rank % len(hosts)], 1, "cpu", 1000.0, num_samples=64 * steps,
                                 steps_per_epoch=steps))  # fmt: skip
            for text in notices if rank == 0 else ():
                writer.write(Notice(text))
            for number in range(1, steps + 1):
                phases = {**spent[rank], "sync": lasts - work[rank]}
                ends = 1000.0 + number * lasts
                writer.write(Step(number, 0, 2.0 / number, 64, 1e-3, lasts, phases["data"], ends,
                                  share=(rank, rank + 1), consumed=64 // ranks, phase_seconds=phases))  # fmt: skip
                if number == 1:
                    writer.write(MemoryBreakdown([("weight", [10, 3], 120)], 120, 120, 240, 0))
                borders, at = [], 0.0
                for name, seconds in phases.items():
                    borders.append((name, at, seconds))
                    at += seconds
                calls = [("gradients", at - exchange, exchange, 120)]
                writer.write(TracedStep(number, ends - lasts, borders, calls))
            writer.write(Ended(steps, 1000.0 + steps * lasts))
    (folder / "summary.json").write_text(
        f'{{"task": "mnist-cnn", "exit": 0, "strategy": "{strategy}", "world_size": {ranks}, "steps": {steps}, '
        f'"threads_per_rank": {threads}, "weights_sha256": "ab12"}}'
    )
    for node, host in enumerate(dict.fromkeys(hosts)):
        got = {rank: RankUse(share, 10**8) for rank, share in (rank_cores or {}).items()}
        use = [MachineUse(1000.0 + second, host, int(cores), 1.0, 10**9, 10**10, ranks=got) for second in range(5)]
        (folder / f"machine-{node}.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in use))
    return folder
