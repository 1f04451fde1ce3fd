"""What a run's page takes from the logs of a script without records: the curve of its loss, and its throughput."""

from statistics import median

from paceline.errors import PacelineError
from paceline.view.analysis import Analyzer
from paceline.view.figures import Figure, line
from paceline.view.run import WholeRun

MOST_BYTES = 8 << 20  # of all logs: a page is made in seconds
RATES = ("samples/s", "samples/s (counted)", "steps/s")


def logged(run: WholeRun) -> tuple[list[Figure], str]:
    """Figures, and a sentence; nothing if there are events, which have better ones."""
    analyzer = Analyzer(run.name)
    if run.ranks:
        return [], ""
    try:
        analyzer.add_run(run.folder, most_bytes=MOST_BYTES)
    except (OSError, PacelineError) as error:
        run.missing.append(f"logs: {error}")
    found = analyzer.result().values
    figures = [
        Figure(f"logged-{number}", name.capitalize(), f"The {name} in the log, line by line.",
               [line(name, [[float(index) for index in range(len(values))]], values, number)],
               x="lines that contain it", y=name, log=name == "loss")
        for number, (name, values) in enumerate(found.items()) if name not in RATES and len(values) > 1
    ]  # fmt: skip
    rate = next((f" It made {median(found[unit]):,.3g} {unit}." for unit in RATES if unit in found), "")
    words = f"This script has kept no records of its steps: these curves were read from its logs.{rate}"
    return figures, words if figures else ""
