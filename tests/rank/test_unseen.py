"""Warnings that come through a hook name the line that called it, as without the hook."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from paceline.rank import hooks
from paceline.rank.sites import Owner, owner, short


class Old:
    """What a user's line calls in torch."""

    def step(self, *, level: int = 2) -> None:
        """Warns of its caller, or of whose caller that is."""
        warnings.warn("old", FutureWarning, stacklevel=level)


def calls_it(level: int) -> None:
    Old().step(level=level)


@pytest.mark.parametrize(("level", "function"), [(2, calls_it), (3, None)])
def test_a_hook_is_passed_over(monkeypatch: pytest.MonkeyPatch, level: int, function: object) -> None:
    assert torch.compiler is sys.modules["torch.compiler"]
    monkeypatch.setattr(Old, "step", Old.step)  # put back at the end
    hooks.hang(Old, "step", after=lambda *_, **__: None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        calls_it(level)
        here = sys._getframe().f_lineno - 1
    line = here if function is None else calls_it.__code__.co_firstlineno + 1
    assert [(one.filename, one.lineno) for one in found] == [(__file__, line)]


def test_its_lines_are_still_ours() -> None:
    code = hooks.Hooks.install.__code__.co_filename
    hooks.hang(Old, "step")
    file = Old.step.__code__.co_filename
    assert file != code and (short(file), owner(file)) == (short(code), Owner.NOBODY)
