"""The figures of what the machines did while a run went on: a line for each host, rank or GPU."""

from collections.abc import Callable, Iterable
from functools import partial

from paceline.observe.machine import MachineUse
from paceline.view.figures import MOST_LINES, Figure, line
from paceline.view.run import WholeRun

NOTHING = 0.005  # of a figure's unit: what never gets higher is left out
OF_GPUS = (  # name, title, unit, field, factor
    ("gpu", "GPU busy", "%", "busy", 100.0),
    ("gpu-memory", "GPU memory", "GB", "memory_bytes", 1e-9),
    ("gpu-power", "GPU power", "W", "watts", 1.0),
    ("gpu-heat", "GPU temperature", "degrees C", "degrees", 1.0),
    ("gpu-clock", "GPU clock", "MHz", "mhz", 1.0),
)


def devices(run: WholeRun) -> Iterable[Figure]:
    """What the machines did meanwhile: a line for each host, or GPU."""
    began = run.first.started[0].unix_time if run.first and run.first.started else min(
        (found[0].unix_time for found in run.machines.values() if found), default=0.0)  # fmt: skip

    def figure(
        name: str, title: str, y: str, value: Callable[[MachineUse], dict[str, float | None]]
    ) -> Iterable[Figure]:
        columns: dict[str, tuple[list[float], list[float]]] = {}
        for found in run.machines.values():
            for one in found:
                for label, number in value(one).items():
                    if number is not None and len(columns) <= MOST_LINES:
                        xs, ys = columns.setdefault(label, ([], []))
                        xs.append(max(0.0, one.unix_time - began) / 60)
                        ys.append(number)
        traces = [line(label, [xs], ys, n) for n, (label, (xs, ys)) in enumerate([*columns.items()][:MOST_LINES])]
        if any(value and value > NOTHING for trace in traces for value in trace["y"]):
            yield Figure(name, title, "Of each machine, about once a second.", traces, x="minutes", y=y, from_zero=True)

    yield from figure(
        "cores", "Processor", "cores busy", lambda m: {m.host: m.cores_busy, f"{m.host}: cores there are": m.cores}
    )
    yield from figure("memory", "Memory in use", "GB", lambda m: {m.host: m.memory_bytes / 1e9})
    yield from figure("rss", "Memory of each rank", "GB",
                      lambda m: {f"rank {r}": use.memory_bytes / 1e9 for r, use in m.ranks.items()})  # fmt: skip
    yield from figure("network", "Network", "MB/s", lambda m: {
        f"{m.host} sent": m.sent_bytes / 1e6, f"{m.host} received": m.received_bytes / 1e6})  # fmt: skip
    for name, title, y, of, factor in OF_GPUS:
        yield from figure(name, title, y, partial(_of_gpus, of=of, factor=factor))


def _of_gpus(machine: MachineUse, *, of: str, factor: float) -> dict[str, float | None]:
    found = {f"{machine.host} GPU {gpu.index}": getattr(gpu, of) for gpu in machine.gpus}
    return {name: None if number is None else number * factor for name, number in found.items()}
