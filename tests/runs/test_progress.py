"""What a person sees: plain lines where there is no terminal, a bar that fits into 80 columns where there is one."""

import io

import pytest
from rich.console import Console
from tests.rendered import rendered

from paceline.runs.progress import Display

SAID = "global batch 64 = 2 ranks x 1 micro-batch x 32 [not markup]"


def shown(*, terminal: bool, visible: bool = True, interval: int = 2) -> str:
    display = Display(total_steps=5, interval=interval, shown=visible)
    text = io.StringIO()
    display._console = Console(file=text, force_terminal=terminal, width=80, quiet=not visible, soft_wrap=True)
    with display:
        display.say(SAID)
        for step in range(1, 6):
            rate = None if step < 3 else 123_456.0
            display.step(step, epoch=0, loss=2.5, lr=1e-3, rate=rate, samples_left=9 * 10**8)
    return text.getvalue()


def test_plain_lines_come_every_interval_and_at_the_end():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == SAID
    assert [line.split()[1] for line in lines[1:]] == ["2/5", "4/5", "5/5"]
    rendered(lines[1:])


def test_only_rank_0_shows_anything():
    assert shown(terminal=False, visible=False) == ""


@pytest.mark.parametrize("word", ["step 5/5", "loss 2.5000", "samples/s", "2:01:30 left"])
def test_the_bar_shows_everything_within_80_columns(word):
    assert word in shown(terminal=True)
