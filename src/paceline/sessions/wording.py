"""What parts that the command shares say of its flags, in words of a session; what of a loop's own can be written."""

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from paceline.errors import PacelineError, UsageError

OF_LAUNCHERS = "nproc|nodes|port|stall-after|max-restarts"  # `paceline launch` has them for own loops, too
WORDS = (
    (r" If you mean it, allow it: --allow-change [\w,]+", " Begin another run: session('another folder')"),
    (r"--run-dir (\S+) is", r"the folder \1 is"),
    (r"--resume auto", "session('...', resume=True)"),
    (r"(, or name another folder|, name that folder|Name another): --run-dir", r"\1: session('...')"),
    (r"--run-dir", "the folder in session('...')"),
    (r"--threads-per-rank", "session(threads=...)"),
    (r"--(device|backend|strategy) ([a-z]+)", r"session(\1='\2')"),
    (rf"--(?!(?:{OF_LAUNCHERS})\b)([a-z]+)-?([a-z]*)( [0-9]+)?", None),
)

CUT = (
    "strategy 'fsdp' has cut this model's weights over ranks: a block has its own while its forward runs. Here one was "
    "used elsewhere: by the module around its block (then name other blocks, session(fsdp_wrap='Block'): what is in "
    "none is there for the whole forward), in a method other than forward, or beside a tensor that is not cut"
)


def as_keywords(text: str) -> str:
    """`text` with session(...) in place of flags."""
    for pattern, words in WORDS:
        text = re.sub(pattern, words or _keyword, text)
    return text


def savable(saved: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A copy of what a file of JSON gives back as it was.

    Raises:
        UsageError: where `strict`, for anything else; otherwise that is left out.
    """
    wrong = [name for name, value in saved.items() if not _is_plain({name: value})]
    if wrong and strict:
        raise UsageError(
            f"s.saved[{wrong[0]!r}] cannot be saved, a {type(saved[wrong[0]]).__name__}: it takes finite numbers, "
            "strings, None, and lists and dictionaries of them, with strings as keys"
        )
    return deepcopy({name: value for name, value in saved.items() if name not in wrong})


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())  # pyright: ignore
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)  # pyright: ignore
    return value is None or isinstance(value, (bool, int, str))


def reword(error: BaseException | None) -> None:
    """Let an error of ours speak of keywords, and one of torch's about cut tensors say what to do."""
    if "mixed torch.Tensor and DTensor" in str(error) and error is not None:
        error.add_note(CUT)
    if isinstance(error, PacelineError):
        error.args = (as_keywords(str(error)), *error.args[1:])


def _keyword(flag: re.Match[str]) -> str:
    name = "_".join(part for part in flag.groups()[:2] if part)
    return f"{name}={flag[3].strip()}" if flag[3] else name
