"""What parts that the command shares say of its flags, in a session's words."""

import re

from paceline.errors import PacelineError

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


def reword(error: BaseException | None) -> None:
    """Let an error of ours speak of keywords, and one of torch's about cut tensors say what to do."""
    if "mixed torch.Tensor and DTensor" in str(error) and error is not None:
        error.add_note(CUT)
    if isinstance(error, PacelineError):
        error.args = (as_keywords(str(error)), *error.args[1:])


def _keyword(flag: re.Match[str]) -> str:
    name = "_".join(part for part in flag.groups()[:2] if part)
    return f"{name}={flag[3].strip()}" if flag[3] else name
