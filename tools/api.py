"""Write docs/api.md from the docstrings of what `paceline` offers: `python tools/api.py`; `--check`: is it so?"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import paceline

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
ROOMS = {
    "Your own loop": ("session", "Session", "Loader", "load_adapter", "run"),
    "A task": ("Task", "Metric", "CallbackState"),
    "The parts, each by itself": (),  # all others
}
INTERNAL = {  # used by other modules of paceline; not for users
    "Loader": (
        *("checkpoint_position", "data_checksum", "draw_epoch_plan", "draw_first_evaluation_batches"),
        *("evaluation_batches", "fingerprint", "is_last_batch"),
        *("restore_sampler", "sampler_state", "training_batches", "uses_no_random_numbers"),
    ),
    "LoadingOptions": ("reuse_or_make_loader", "worker_settings"),
    "BatchPlan": ("known_steps_per_epoch", "epoch_size_text"),
    "Schedule": ("json_state", "load", "set_lr"),
}
LONGEST = 90  # characters of a signature in a heading; a longer one has a block with a line for each argument
HEAD = """# The Python interface

Written from the docstrings by `python tools/api.py`; a test says when it is stale. The pages that explain:
[your own loop](own-loop.md), [Task, field by field](task.md), [evaluation](evaluation.md).
"""


def prose(docstring: str | None) -> str:
    """A docstring in Google's style as Markdown."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    out: list[str] = []
    in_list = in_code = False
    for line in lines:
        if re.fullmatch(r"(Args|Returns|Raises|Yields):", line):
            out += [*(("```", "") if in_code else ()), f"*{line}*", ""]
            in_list, in_code = True, False
        elif in_list and (entry := re.fullmatch(r" {4}([*\w]+(?:, \w+)*): (.*)", line)):
            out.append(f"- `{entry[1]}`: {entry[2]}")
        elif in_list and line.strip():
            out.append(f"  {line.strip()}" if out[-1].startswith(("-", "  ")) else line.strip())
        elif line.startswith("    ") and not in_list:
            out += [*(() if in_code else ("```text",)), line[4:]]
            in_code = True
        else:
            if in_code and line.strip():
                out += ["```", ""]
                in_code = False
            in_list = in_list and not line.strip()
            out.append(line)
    return "\n".join([*out, "```"] if in_code else out).strip()


def called(name: str, function: Any, *, method: bool = False) -> str:
    """`name(a, b=1)`, without types."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self" or not method]
    words = str(found.replace(parameters=plain, return_annotation=found.empty))
    words = re.sub(r"environ\(\{.*\}\)", "os.environ", words)  # not what is in it here
    return f"{name}{re.sub(r'<.*? at 0x[0-9a-f]+>', '...', words)}"


def headed(level: str, name: str, function: Any, *, method: bool = False) -> str:
    """The heading of a function; below it a long signature, with types, a line for each argument."""
    words = called(name, function, method=method)
    if len(words) <= LONGEST:
        return f"{level} `{words}`"
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(node, ast.FunctionDef)
    lines = list[str]()
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*," not in lines and not any(line.startswith("*") for line in lines):
            lines.append("*,")
        words = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
        kind = next((a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.arg == one.name), None)
        words += f": {ast.unparse(kind)}" if kind else ""
        if one.default is not one.empty:
            words += " = os.environ" if one.default is os.environ else f" = {re.sub('<.*>', '...', repr(one.default))}"
        lines += [] if method and one.name == "self" else [f"{words},".replace("'", '"')]  # as ruff formats it
    return "\n".join(
        [
            f"{level} `{name}`\n\n```python",
            f"def {name.removeprefix('.')}(",
            *(f"    {line}" for line in lines),
            f"){f' -> {ast.unparse(node.returns)}' if node.returns else ''}: ...",
            "```",
        ]
    )


def constant(name: str) -> str:
    """What the text below a constant says in the module that defines it."""
    module = importlib.import_module(f"paceline.{vars(paceline)['_LAZY_EXPORTS'][name]}")
    body = ast.parse(inspect.getsource(module)).body
    for node, after in itertools.pairwise(body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.unparse(node).startswith(name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), f"{name} has no docstring"
            return str(after.value.value)
    raise AssertionError(name)


def fields(kind: type) -> list[str]:
    """Of a record: each field, and the words below it."""
    (body,) = (n for n in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if isinstance(n, ast.ClassDef))
    found: list[str] = []
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            words = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            told = f": {' '.join(str(words).split())}" if words else ""
            found.append(f"- `{ast.unparse(node.target)}` (`{ast.unparse(node.annotation)}`){told}")
    return found


def entry(name: str, thing: Any) -> str:
    """One part: its signature, words, fields and methods."""
    if not inspect.isclass(thing):
        head = headed("###", name, thing) if callable(thing) else f"### `{name}`"
        return f"{head}\n\n{prose(thing.__doc__ if callable(thing) else constant(name))}\n"
    assert all(hasattr(thing, word) for word in INTERNAL.get(name, ())), f"INTERNAL of {name} is stale"
    own = getattr(thing, "__dataclass_fields__", None) is not None
    blocks = [f"### `{name}`", prose(thing.__doc__), *(["\n".join(fields(thing))] if own else [])]
    for word, member in inspect.getmembers(thing):
        if word.startswith("_") or word in INTERNAL.get(name, ()) or not getattr(member, "__doc__", None):
            continue
        if isinstance(member, property):
            blocks += [f"#### `.{word}`", prose(member.__doc__)]
        elif inspect.isfunction(member) and str(member.__module__).startswith("paceline"):
            blocks += [headed("####", f".{word}", member, method=True), prose(member.__doc__)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def page() -> str:
    """The whole page."""
    from paceline.sessions.loader import Loader

    named = {name for names in ROOMS.values() for name in names}
    out = [HEAD]
    for title, names in ROOMS.items():
        out.append(f"## {title}\n")
        for name in names or [n for n in paceline.__all__ if n not in named and not n.startswith("__")]:
            out.append(entry(name, Loader if name == "Loader" else getattr(paceline, name)))
    return "\n".join(out).rstrip() + "\n"


def main(words: list[str]) -> int:
    """1 if --check finds the page stale."""
    now = page()
    if "--check" in words:
        stale = not PAGE.is_file() or PAGE.read_text() != now
        print("docs/api.md is not that of the docstrings: python tools/api.py" if stale else "docs/api.md is right")
        return int(stale)
    PAGE.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
