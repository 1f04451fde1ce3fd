"""The pictures that the product made of itself: there, shown, small, inert, and of no machine in particular."""

import re
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.config.strategies import STRATEGY_INFO

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTHS = {"report-light.png": 1440, "report-dark.png": 1440, "report-phone.png": 390}
RUNGS = {f"ladder-{name}.svg" for name in STRATEGY_INFO if name != "dp"}  # dp needs several GPUs
MOST_BYTES = {".png": 150_000, ".svg": 100_000}
DRAWN = sorted(PICTURES.glob("*.svg"))

svgs = pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)


def test_every_picture_is_there_and_small() -> None:
    assert {path.name for path in PICTURES.iterdir()} == {*WIDTHS, "watch.svg", *RUNGS}
    assert [path.name for path in PICTURES.iterdir() if path.stat().st_size > MOST_BYTES[path.suffix]] == []


@pytest.mark.parametrize(("name", "width"), WIDTHS.items())
def test_a_page_was_seen_at_its_width(name: str, width: int) -> None:
    head = (PICTURES / name).read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:])[0] == width


@svgs
def test_a_drawing_asks_for_nothing_runs_nothing_and_names_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert {node.tag.rpartition("}")[2] for node in root.iter()} & {"script", "image", "foreignObject", "a"} == set()
    assert [name for node in root.iter() for name in node.attrib if name.endswith("href")] == []
    requests, machine = r"@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg\")", r"/tmp/|/home/|/root/|/work/|\x1b"
    assert re.findall(f"{requests}|{machine}", text) == []


@pytest.mark.parametrize("name", sorted(RUNGS))
def test_a_rungs_drawing_has_all_its_colours_in_light_and_in_dark(name: str) -> None:
    text = (PICTURES / name).read_text()
    style = text.partition("<style>")[2].partition("</style>")[0]
    light, _, dark = style.partition("prefers-color-scheme: dark")
    used = {word for words in re.findall(r'class="([^"]*)"', text) for word in words.split()} - {"plain"}
    assert used >= {"ground", "on"}
    assert [word for word in used if f".{word} " not in style] == []
    for variable in set(re.findall(r"var\((--[a-z]+)\)", style)):
        assert f"{variable}:" in light and f"{variable}:" in dark, variable


def test_an_unknown_picture_is_refused() -> None:
    command = [sys.executable, ROOT / "tools" / "pictures.py", "ladder-none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ladder-single" in done.stderr
