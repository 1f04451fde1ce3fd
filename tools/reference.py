"""Write docs/reference/*.md: `python tools/reference.py`; `--check`: are they those of the program?

commands.md     the options of each command, as --help-all has them
settings.md     the keys of config.toml, from the docstrings of config/settings.py
events.md       the records of a run folder, and of --on-event, from runs/, guard/report.py and protocol/
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli import COMMANDS, make_parser
from paceline.cli.options import Option, docstring_paragraphs
from paceline.config.choices import LAUNCHER_SETTINGS
from paceline.protocol.evidence import DiagnosisKind

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"

HEAD = """# Commands

All options of all commands, as `paceline COMMAND --help-all` prints them; `--help` prints the common ones. An option
without a value has an opposite: `--no-NAME`. The options of a task: `paceline train TASK --help`. Exit codes of the
commands: [exit codes](../exit-codes.md). `python tools/reference.py` writes this page; a test says when it is stale.

{index}

"""
SETTINGS = """# Settings

The keys of a run's `config.toml`, and of the file that `paceline train --config FILE` reads. Written from the
docstrings of `src/paceline/config/settings.py` by `python tools/reference.py`; a test says when it is stale.

- A key stands in the table of its section: `[data]`, then `batch_size = 64`. `task`, `strategy` and `task_arg` stand
  above all tables.
- The option is the key with `-` for `_`, without the section: `--batch-size 64`. An option overrides the file, and
  `paceline train --config FILE --help` shows the values of the file.
- *none* is the default where nothing is set: leave the key out.

"""
EVENTS = """# Events

A run logs its events in `events-RANK.jsonl`, one file for each rank, and the use of its nodes in
`machine-NODE.jsonl`. Each record is one line of JSON, and `kind` is its type. Readers skip kinds that they do not know.
The command of `--on-event` reads [events of the run](#of-the-run-input-of-the-event-command).
`python tools/reference.py` writes this page from the classes of the records, and a test fails if it is stale.
[The run folder](../run-folder.md) describes the other files.

`unix_time` is in seconds since 1970. Durations are in seconds.

"""
COUNTS = {
    "Annotated[int, msgspec.Meta(ge=1, le=MAX_MERGED_STEPS)]": "int, 1 or more",
    "Count": "int, 0 or more",
    "RankCount": "int, 0 to 1,000,000",
    "Seconds": "float, up to 1e12",
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """For people, in Markdown."""

    def line(cells: tuple[str, ...]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)]) + "\n"


# ---- commands --------------------------------------------------------------------------------------------------------


def commands() -> str:
    """The page of the commands; options of several commands are at its end."""
    lines = {name: make_parser(name) for name in COMMANDS}
    groups = {name: line.groups(line.options()) for name, line in lines.items()}
    users: dict[type, list[str]] = {}
    for name, found in groups.items():
        for _, group, _ in found:
            users.setdefault(group, []).append(name)
    shared = {group for group, names in users.items() if len(names) > 1}
    index = "\n".join(
        f"- [`paceline {name}`](#paceline-{name}): {command.help_line}" for name, command in COMMANDS.items()
    )
    parts = [HEAD.format(index=index)]
    for name, line in lines.items():
        about, *more = docstring_paragraphs(line.settings)
        parts.append(f"## `paceline {name}`\n\n{_plain(about)}\n\n")
        parts.append("```bash\n" + "\n".join(line.examples) + "\n```\n\n")
        parts += [f"{_plain(words)}\n\n" for words in more]
        parts.append(f"```text\nusage: {line.usage(line.options())}\n```\n\n")
        parts.append(rows("argument", [one for one in line.options() if not one.name.startswith("-")]))
        for title, group, options in groups[name]:
            parts.append("" if group in shared else f"### {title}\n\n{rows('option', options)}")
        also = [f"[{title}](#{slug(title)})" for title, group, _ in groups[name] if group in shared]
        parts.append(f"Also: {'; '.join(also)}.\n\n" if also else "")
    for group in sorted(shared, key=lambda one: docstring_paragraphs(one)[0]):
        names = ", ".join(f"`paceline {name}`" for name in users[group])
        options = next(each for _, one, each in groups[users[group][0]] if one is group)
        parts.append(
            f"## {docstring_paragraphs(group)[0].removesuffix('.')}\n\nOptions of {names}.\n\n{rows('option', options)}"
        )
    return "".join(parts).rstrip() + "\n"


def rows(kind: str, options: list[Option]) -> str:
    """Options, or arguments, as a table."""
    found = list[tuple[str, ...]]()
    for one in options:
        shown = re.sub(",(?=[^{}]*})", ", ", one.usage_form)
        default = f"`{one.default_text}`" if one.default_text else ""
        found.append((f"`{shown}`", _plain(one.text), default))
    return table((kind, "meaning", "default"), found) + "\n" if found else ""


def slug(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _plain(words: str) -> str:
    """Text that Markdown leaves as it is, but for `code`."""
    parts = re.split("(`[^`]*`)", words)
    return "".join(p if p.startswith("`") else re.sub(r"([*\[\]])", r"\\\1", p).replace("<", "&lt;") for p in parts)


# ---- settings and events: the fields of records, as their modules have them -----------------------------------------


@dataclass
class Record:
    """A class of fields: (name, type, default, words)."""

    name: str
    tag: str
    words: str
    fields: list[tuple[str, str, str, str]] = field(default_factory=list[tuple[str, str, str, str]])


def records(path: Path) -> list[Record]:
    """The public classes of a module that have fields; a field's words are below it, or behind it as a comment."""
    text = path.read_text()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    found: list[Record] = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        tags = [ast.literal_eval(word.value) for word in node.keywords if word.arg == "tag"]
        record = Record(node.name, tags[0] if tags else "", " ".join((ast.get_docstring(node) or "").split()))
        for line, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign):
                below = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                words = str(below) or comments.get(line.lineno, "")
                default = "" if line.value is None else ast.unparse(line.value)
                record.fields.append(
                    (ast.unparse(line.target), _type(line.annotation), default, " ".join(words.split()))
                )
        if record.fields:
            found.append(record)
    return found


def _type(annotation: ast.expr) -> str:
    """As people read it."""
    words = ast.unparse(annotation).replace(" | None", "")
    if choices := re.fullmatch(r"Literal\[(.*)\]", words):
        return ", ".join(re.findall(r"'([^']*)'", choices[1]))
    words = re.sub(r"(?:int \| )?Literal\['(\w+)'\]", lambda m: m[0].split("Literal")[0] + m[1], words)
    words = re.sub(r"^tuple\[str, \.\.\.\]$", "list of str", words)
    if words not in COUNTS:
        words = re.sub(r"\b(Count|Few)\b", "int", words).replace("Seconds", "float")
    words = words.replace("LauncherName", ", ".join(LAUNCHER_SETTINGS))
    return COUNTS.get(words, words).replace("StrategyName", "name of a strategy").replace("Path", "path")


def settings() -> str:
    """The page of the settings."""
    found = {record.name: record for record in records(SOURCE / "config" / "settings.py")}
    whole = found["TrainConfig"]
    sections = {name: kind for name, kind, _, _ in whole.fields if kind in found}
    own = [row for row in whole.fields if row[0] not in sections]
    parts = [SETTINGS]
    for title, said, rows in [
        ("Above all tables", "", own),
        *((f"`[{name}]`", found[kind].words, found[kind].fields) for name, kind in sections.items()),
    ]:
        cells = [(f"`{name}`", kind, _default(default), _plain(words)) for name, kind, default, words in rows]
        parts.append(f"## {title}\n\n" + (f"{said}\n\n" if said else ""))
        parts.append(table(("key", "value", "default", "meaning"), cells) + "\n")
    return "".join(parts).rstrip() + "\n"


def _default(code: str) -> str:
    if code in ("None", "()", "''"):
        return "none"
    return f"`{code.lower() if code in ('True', 'False') else ast.literal_eval(code)}`"


def events() -> str:
    """The page of the events."""
    parts = [EVENTS]
    shown = ("RunEvent", "Diagnosis", "Op")
    found = [*records(SOURCE / "guard" / "report.py"), *records(SOURCE / "protocol" / "evidence.py")]
    of_run = sorted((one for one in found if one.name in shown), key=lambda one: shown.index(one.name))
    for title, found in (
        ("Of each rank: `events-RANK.jsonl`", records(SOURCE / "runs" / "events.py")),
        ("Of each node: `machine-NODE.jsonl`", records(SOURCE / "runs" / "machine.py")),
        ("Of the run: input of the event command", of_run),
    ):
        parts.append(f"## {title}\n\n")
        for record in found:
            alone = record.tag or (record.name if record.name == "RunEvent" else "")
            name = f"`{alone}`" if alone else f"`{record.name}`, inside another record"
            parts.append(f"### {name}\n\n{_plain(record.words)}\n\n")
            rows = [
                (f"`{name}`", kind if kind in COUNTS.values() else f"`{kind}`", _plain(words))
                for name, kind, _, words in record.fields
            ]
            parts.append(table(("field", "type", "meaning"), rows) + "\n")
    kinds = ", ".join(f"{kind.value} {kind.name}" for kind in DiagnosisKind)
    parts.append(f"The kinds of a diagnosis (`DiagnosisKind`): {kinds}.\n")
    return "".join(parts).rstrip() + "\n"


def main(words: list[str]) -> int:
    """1 if --check finds a page stale."""
    stale = 0
    for name, make in (("commands", commands), ("settings", settings), ("events", events)):
        page, now = ROOT / "docs" / "reference" / f"{name}.md", make()
        if "--check" not in words:
            page.parent.mkdir(exist_ok=True)
            page.write_text(now)
        elif not page.is_file() or page.read_text() != now:
            print(f"docs/reference/{name}.md is not what the program says: python tools/reference.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
