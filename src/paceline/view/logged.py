"""What a run's page takes from the logs: all that is known of a script without records, and what is out of order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.view.analysis import Analyzer
from paceline.view.analyzed import add_logs
from paceline.view.curves import Curve
from paceline.view.figures import Figure, line
from paceline.view.run import WholeRun
from paceline.view.tables import Table

MOST_BYTES = 8 << 20  # of all logs: a page is made in seconds


@dataclass
class Logged:
    """What the logs say."""

    figures: list[Figure] = field(default_factory=list[Figure])
    tables: list[Table] = field(default_factory=list[Table])
    sentence: str = ""


def logged(run: WholeRun) -> Logged:
    """Read the logs of all ranks; curves only where no events have better ones."""
    analyzer = Analyzer(run.name)
    try:
        add_logs(analyzer, run.folder, only_trouble=bool(run.ranks), most_bytes=MOST_BYTES)
    except (OSError, PacelineError) as error:
        run.missing.append(f"logs: {error}")
    result = analyzer.result()
    found = Logged()
    rows = [[one.kind, one.rank, one.where, one.words] for one in result.anomalies]
    if rows:
        many = ", ".join(f"{kind}: {count:,}" for kind, count in result.counts.items())
        found.tables.append(Table("Unusual lines in the logs", ["kind", "rank", "where", "words"], rows, f"{many}."))
    if run.ranks:
        return found
    for name, curve in (("loss", result.loss), *((f"test {name}", one) for name, one in result.held_out.items())):
        if curve is not None and curve.count > 1:
            found.figures.append(_figure(name, curve, len(found.figures)))
    if found.figures:
        found.sentence = "This script has kept no records of its steps: what stands here was read from its logs."
        for rate in result.throughput[:1]:
            found.sentence += f" It made {rate.median:,.3g} {rate.unit}."
    return found


def _figure(name: str, curve: Curve, number: int) -> Figure:
    values: Sequence[float] = [point.value for point in curve.points]
    order = [float(index * curve.count / len(values)) for index in range(len(values))]
    words = f"The {name} as the log tells it, line by line."
    return Figure(f"logged-{number}", name.capitalize(), words, [line(name, [order], values, number)],
                  x="lines that tell it", y=name, log=name == "loss")  # fmt: skip
