"""Which line of a stack is the user's: through frameworks, in their callbacks, and where nothing is the user's."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests import warm

from paceline.guard.sentences import format_rank_state
from paceline.protocol.code_locations import BY, format_stack_location, is_stack_in_op, parse_faulthandler_stack
from paceline.protocol.evidence import Evidence, Frame, Op, Stack
from paceline.rank.sites import SITE_CHARS, call_site, frame_record, user_frame_of_error

PACKAGES = "/x/lib/python3.11/site-packages/"
TORCH = f"{PACKAGES}torch/distributed/distributed_c10d.py:9"
OUTER, TRAINER = f"{PACKAGES}transformers/trainer.py:2", f"{PACKAGES}transformers/trainer.py:5"
GATHER = f"{PACKAGES}accelerate/utils/operations.py:7"
LIBRARY = {"library": True}


def nested(lines: Sequence[str], innermost: Callable[[], list[str]]) -> list[str]:
    """Call `innermost` from a stack of functions `go` with just these lines, the innermost first."""
    call = innermost
    for line in lines:
        file, _, number = line.rpartition(":")
        space: dict[str, Callable[[Callable[[], list[str]]], Callable[[], list[str]]]] = {}
        source = "\n" * (int(number) - 1) + "def make(inner): go = lambda: inner(); return go"
        exec(compile(source, file, "exec"), space)
        call = space["make"](call)
    return call()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([TORCH, "/home/u/train.py:3", "/home/u/main.py:4"], "train.py:3"),
        ([TORCH, TRAINER, OUTER, "/u/train.py:3"], "train.py:3, by transformers/trainer.py:5"),
        ([TORCH, GATHER, TRAINER, OUTER, "/u/train.py:3"], "train.py:3, by transformers/trainer.py:5"),
        ([TORCH, *[GATHER] * 60, "/u/train.py:3"], "train.py:3, by accelerate/utils/operations.py:7"),
        ([TORCH, f"{PACKAGES}six.py:4", "/u/train.py:3"], "train.py:3, by six.py:4"),
        (["/u/collate.py:8", TRAINER, "/u/train.py:3"], "collate.py:8"),
        ([TORCH, GATHER, *[TRAINER] * 110], "accelerate/utils/operations.py:7"),  # nothing is the user's
    ],
)
def test_the_line_is_the_users_and_beside_it_that_of_a_library(lines: list[str], words: str) -> None:
    """By the frames of this very process, and by those in the evidence, ours or faulthandler's."""

    def told() -> list[str]:
        frame, stack = sys._getframe(1), list[Frame]()
        site = call_site(frame).describe()
        while len(stack) < len(lines):
            assert frame is not None
            stack.append(frame_record(frame))
            frame = frame.f_back
        files = "".join(f'  File "{line.rpartition(":")[0]}", line {line.rpartition(":")[2]} in f\n' for line in lines)
        return [site, format_stack_location(stack), format_stack_location(parse_faulthandler_stack(files))]

    assert [said.replace(" in <lambda>", "").replace(" in f", "") for said in nested(lines, told)] == [words] * 3


def test_long_words_leave_the_librarys_line_whole() -> None:
    frames = [Frame("lightning/pytorch/loops/fit.py", 41, "g", **LIBRARY), Frame("train.py", 3, "f" * 90)]
    said = format_stack_location(frames)
    assert len(said) == SITE_CHARS and said.endswith(f"fff{BY}lightning/.../fit.py:41")


def test_a_rank_stands_at_a_call_only_in_the_same_line_of_the_library() -> None:
    main = Frame("train.py", 40, "main")
    frames = (Frame("torch/x.py", 1, "wait"), Frame("transformers/trainer.py", 3700, "step", **LIBRARY), main)
    here = Evidence(0, "n1", 1, stacks=(Stack("main", frames),))
    for at, stands in ((3700, True), (2100, False)):
        op = Op("0", 1, "all_reduce", site=f"train.py:40 in main, by transformers/trainer.py:{at}")
        assert is_stack_in_op(here, op) is stands
    assert f"train.py:40{BY}transformers/trainer.py:3700" in format_rank_state(here)


def test_an_error_has_the_users_innermost_line_or_else_that_of_the_caller() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        nested([TORCH, "/u/collate.py:8", TRAINER, "/u/train.py:3"], partial(int, "x"))
    innermost, caller = user_frame_of_error(caught.value), user_frame_of_error(ValueError())
    assert innermost is not None and (innermost.file, innermost.line) == ("collate.py", 8)
    assert caller is not None and caller.file.endswith("test_sites.py")


TWICE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from paceline.rank.guard import HangGuard
guard = HangGuard.of_process().watch_torch()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from framework import train
for swapped in (False, True, False):
    train(swapped)
    order = guard.ledger.take_order_hash()
    print(order, *[op.site.partition(", ")[2] for op in guard.ledger.last_ordered_calls()], sep="|")
dist.destroy_process_group()
"""
FRAMEWORK = """
import torch, torch.distributed as dist
def train(swapped):
    one = lambda: dist.all_reduce(torch.ones(1))
    two = lambda: dist.all_reduce(torch.ones(1))
    for step in (two, one) if swapped else (one, two):
        step()
"""


def test_two_calls_of_one_framework_do_not_look_alike(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages" / "framework"
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text(FRAMEWORK)
    done = warm.run(["-c", TWICE, str(packages.parent)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, swapped, again = (line.split("|") for line in done.stdout.splitlines())
    one, two = (f"by framework/__init__.py:{line}" for line in (4, 5))
    assert (first[1:], swapped[1:]) == ([one, two], [two, one])
    assert first == again and first[0] != swapped[0]
