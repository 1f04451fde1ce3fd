"""Make the pictures in docs/pictures/, by running the product: `python tools/pictures.py [--now] [NAME ...]`.

    report        report-light.png, report-dark.png, report-phone.png: the page of a run, in Chromium
    watch         watch.svg: `paceline watch` of four ranks, one of them niced, on a terminal of its own
    ladder-RUNG   ladder-RUNG.svg: what `paceline report --explain` draws of a run of that strategy

ladder-exact.svg, ladder-zero.svg and ladder-fsdp.svg were drawn by an earlier version. They show no times of a run, or
few, and are not redrawn.

Without names: all. Before each it waits up to two minutes for a quiet machine, as pictures show times; with --now it
does not. Look at them afterwards.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import time
from pathlib import Path

from markupsafe import escape

from paceline.report.figures import Diagram, make_diagrams
from paceline.report.run import read_run

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
STYLE = ROOT / "src" / "paceline" / "report" / "templates" / "report.css"
PACELINE = (sys.executable, "-m", "paceline")
MOST_BYTES = {".png": 150_000, ".svg": 100_000}
LONGEST_SECONDS, QUIET_SECONDS = 600, 120

STAGES, STEP = "The four stages", "Step "
MODEL = (f"{ROOT}/examples/own_transformer.py:large", "--steps", "18", "--batch-size", "32")  # as in the transcripts
RUNGS = {  # the number of processes, and which drawings of the run are shown
    "single": (1, (STAGES, STEP)),
    "manual": (2, (STEP,)),
    "bucketed": (2, (STEP,)),
    "ddp": (2, (STAGES, STEP)),
}
MESSAGES = {"PACELINE_SHARED_MEMORY": "off"}  # `bucketed` uses its buckets where ranks share no memory
REPORTED = ("mnist-cnn", "--nproc", "2", "--steps", "200", "--eval-every", "40", "--checkpoint-every", "50")
WATCHED = ("mnist-cnn", "--nproc", "4", "--steps", "4000", "--batch-size", "32", "--checkpoint-every", "50")
VIEWS = {"light": (1440, 1140), "dark": (1440, 1140), "phone": (390, 844)}
ROWS, COLUMNS = 10, 100
SEEN_SECONDS, LOOK_SECONDS = 40, 14  # until there is something to see; until the table has its curves
NICED_RANK = 2
GAP, LETTER, LINE = 16.0, 7.2, 18.0


def settle() -> None:
    """Wait until the machine has a core to spare, or for as long as that is worth."""
    until = time.monotonic() + QUIET_SECONDS
    while "--now" not in sys.argv and os.getloadavg()[0] > (os.cpu_count() or 1) and time.monotonic() < until:
        time.sleep(2.0)


def train(folder: Path, words: tuple[str, ...], settings: dict[str, str] | None = None) -> Path:
    """A run in folder/runs/demo; its paths are relative, so pictures show nothing of where it was."""
    settle()
    subprocess.run(
        (*PACELINE, "train", *words, "--run-dir", "runs/demo"), cwd=folder, env={**os.environ, **(settings or {})},
        check=True, stdout=subprocess.DEVNULL, timeout=LONGEST_SECONDS,
    )  # fmt: skip
    return folder / "runs" / "demo"


def colours() -> str:
    """The page's colours and shapes, for a picture that stands alone: dark where the reader's screen is."""
    css = STYLE.read_text()
    light = re.search(r":root \{\n(.*?)\}", css, re.DOTALL)
    dark = re.search(r"prefers-color-scheme: dark\) \{[^{]*\{(.*?)\} \}", css, re.DOTALL)
    assert light and dark
    shapes = "\n".join(line for line in css.splitlines() if line.startswith("svg "))
    more = ".ground { fill: var(--ground); } svg .title { font-weight: 600; font-size: 15px; }"
    return f"svg {{{light[1]}}}\n@media (prefers-color-scheme: dark) {{ svg {{{dark[1]}}} }}\n{shapes}\n{more}"


def standalone(found: list[Diagram]) -> str:
    """The drawings below each other, each with its title and its caption, as a separate file."""
    width, y, parts = 0.0, GAP, list[str]()
    for one in found:
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', one.svg)
        assert size
        width = max(width, float(size[1]))
        parts.append(f'<text x="0" y="{y + 14:.0f}" class="plain title">{escape(one.title)}</text>')
        y += 20
        for line in textwrap.wrap(one.caption, int(float(size[1]) / LETTER)):
            y += LINE
            parts.append(f'<text x="0" y="{y:.0f}" class="soft">{escape(line)}</text>')
        y += GAP
        parts.append(str(one.svg).replace("<svg ", f'<svg y="{y:.0f}" ', 1).replace(' aria-hidden="true"', "", 1))
        y += float(size[2]) + GAP
    box = f"{-GAP:.0f} 0 {width + 2 * GAP:.0f} {y:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{width + 2 * GAP:.0f}" height="{y:.0f}">'
    ground = f'<rect x="{-GAP:.0f}" width="100%" height="100%" class="ground"/>'
    return f"{head}\n<style>\n{colours()}\n</style>\n{ground}\n" + "\n".join(parts) + "\n</svg>\n"


def rung(name: str, folder: Path) -> None:
    """One of the ladder's."""
    nproc, titles = RUNGS[name]
    words = (*MODEL, "--nproc", str(nproc), "--threads-per-rank", "1", "--strategy", name)
    run = train(folder, words, MESSAGES if name == "bucketed" else None)
    made = make_diagrams(read_run(run))
    shown = [next(one for one in made if one.title.startswith(title)) for title in titles]
    (PICTURES / f"ladder-{name}.svg").write_text(standalone(shown))


def report(folder: Path) -> None:
    """The top of a page, as people see it first."""
    from playwright.sync_api import sync_playwright

    run = train(folder, REPORTED)
    subprocess.run((*PACELINE, "report", "runs/demo"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        )
        for name, (width, height) in VIEWS.items():
            scheme = "light" if name == "light" else "dark" if name == "dark" else "light"
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto((run / "report.html").as_uri())
            for place in (300, 600, 900, 0):  # figures are drawn when they come into sight
                page.evaluate(f"scrollTo(0, {place})")
                page.wait_for_timeout(400)
            page.screenshot(path=PICTURES / f"report-{name}.png")
        browser.close()


def nice(folder: Path) -> None:
    """Let one rank have less of its core: the table should say so."""
    for agent in folder.glob("runs/demo/attempt-1/agent-*.json"):
        for worker in json.loads(agent.read_text())["workers"]:
            if worker["rank"] == NICED_RANK:
                os.setpriority(os.PRIO_PROCESS, worker["pid"], 19)


def watch(folder: Path) -> None:
    """The terminal, a while after the start."""
    settle()
    command = (*PACELINE, "train", *WATCHED, "--run-dir", "runs/demo")
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(SEEN_SECONDS)
        nice(folder)
        time.sleep(SEEN_SECONDS)
        looked = on_terminal((*PACELINE, "watch", "runs/demo"), folder)
    finally:
        run.terminate()
        run.wait(60)
    (PICTURES / "watch.svg").write_text(without_network(looked))


def on_terminal(words: tuple[str, ...], folder: Path) -> str:
    """What a command of textual's shows on a terminal of its own, as SVG; textual itself takes the picture."""
    # fmt: off
    taken = {"TEXTUAL_SCREENSHOT": f"{LOOK_SECONDS}", "TEXTUAL_SCREENSHOT_LOCATION": f"{folder}",
             "TEXTUAL_SCREENSHOT_FILENAME": "screen.svg", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    # fmt: on
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    shown = subprocess.Popen(
        words, cwd=folder, env={**os.environ, **taken}, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        try:
            if not os.read(ours, 1 << 16):
                break
        except OSError:  # nobody has the other end any more
            break
    shown.terminate()
    shown.wait(30)
    os.close(ours)
    return (folder / "screen.svg").read_text()


def without_network(svg: str) -> str:
    """Rich's SVG asks a server for a font: the reader's own will do, as each piece of text has its length."""
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace")
    return re.sub(r"\s*<!--.*?-->", "", svg)


def main(names: list[str]) -> int:
    """1 if a picture has become too large."""
    makers = {"report": report, "watch": watch}
    every = [*makers, *(f"ladder-{name}" for name in RUNGS)]
    names = [name for name in names if name != "--now"]
    if unknown := [name for name in names if name not in every]:
        print(f"no picture is called {unknown[0]}: choose from {', '.join(every)}", file=sys.stderr)
        return 2
    PICTURES.mkdir(exist_ok=True)
    for name in names or every:
        with tempfile.TemporaryDirectory() as folder:
            if name in makers:
                makers[name](Path(folder))
            else:
                rung(name.removeprefix("ladder-"), Path(folder))
        print(name, flush=True)
    large = [path.name for path in PICTURES.iterdir() if path.stat().st_size > MOST_BYTES[path.suffix]]
    if large:
        print(f"too large: {', '.join(large)}", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
