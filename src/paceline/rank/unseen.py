"""Frames that Python's warnings do not see, so that a warning names the line of the user's that called through us.

`warnings` passes over the frames of the import system, which it knows by two words in the name of their file, wherever
it counts a stack level. A function of ours between a user's line and torch's has them in its file's name, too.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])
UNSEEN = " (as importlib._bootstrap)"


def unseen(function: T) -> T:
    """Have warnings pass over this function, which is not running yet."""
    changed: Any = function
    changed.__code__ = changed.__code__.replace(co_filename=changed.__code__.co_filename + UNSEEN)
    return function
