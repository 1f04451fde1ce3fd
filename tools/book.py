"""A hook of mkdocs: what pages link to outside docs/ (sources, records, the README) becomes a page of the book, too.

So the book is whole by itself, without a network or a clone, and a page has the same links here as on the forge.
Each such file is source/PATH in the book. Markdown stays what it is; code is shown as code; other files are copied.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".txt": "text", "": "text"}
LINK = re.compile(r"(\]\()([^)#\s]+)")
CODE = re.compile(r"`[^`\n]+`")
FENCED = re.compile(r"(^(?P<fence>`{3,}).*?^(?P=fence)$)", re.MULTILINE | re.DOTALL)

_pages: dict[str, str] = {}
"""where a file of the repository is in the book: both as paths"""


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each file that a page links to, and for those that these link to."""
    _pages.clear()
    _pages.update({f"docs/{file.src_uri}": file.src_uri for file in files if not file.src_uri.startswith("source/")})
    todo = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while todo:
        path, text = todo.pop()
        for target in _targets(path, text):
            if target not in _pages and (ROOT / target).exists():
                uri, content = _page(target)
                _pages[target] = uri
                files.append(File.generated(config, uri, content=content))
                if uri.endswith(".md"):
                    todo.append((target, content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the book; pipes in code stay pipes."""
    here = next(path for path, uri in _pages.items() if uri == page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _resolved(here, match[2])
        if target not in _pages:
            return match[0]
        return match[1] + posixpath.relpath(_pages[target], posixpath.dirname(page.file.src_uri) or ".")

    parts = re.split(FENCED, markdown)[::3]
    fences = [match[0] for match in FENCED.finditer(markdown)] + [""]
    # in a table the forge wants \| also in code; here the backslash would be seen
    parts = [CODE.sub(lambda code: code[0].replace("\\|", "|"), LINK.sub(moved, part)) for part in parts]
    return "".join(part + fence for part, fence in zip(parts, fences, strict=True))


def on_post_page(output: str, **_: Any) -> str:
    """Name the search, which the theme does not."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def _targets(path: str, text: str) -> list[str]:
    return [_resolved(path, match[2]) for match in LINK.finditer(FENCED.sub("", text)) if "://" not in match[2]]


def _resolved(path: str, target: str) -> str:
    """`target`, as a page at `path` links to it, as a path in the repository."""
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    return posixpath.normpath(posixpath.join(folder, target))


def _page(path: str) -> tuple[str, str]:
    """Where it is in the book, and what it says there."""
    file = ROOT / path
    hidden = "---\nsearch: {exclude: true}\n---\n"
    if file.is_dir():
        names = sorted(child.name for child in file.glob("[!_]*.*") if child.suffix in (".py", ".md"))
        return f"source/{path}/index.md", f"{hidden}# {path}\n\n" + "".join(f"- [{n}]({n})\n" for n in names)
    if file.suffix == ".md":
        return f"source/{path}", hidden + file.read_text()
    if file.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(file.read_text())["cells"]]
        shown = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells]
        return f"source/{path}.md", hidden + "\n\n".join(shown)
    if file.suffix in LANGUAGES:
        fence = f"`````{LANGUAGES[file.suffix]}\n{file.read_text()}\n`````\n"
        wide = hidden.replace("---\n", "---\nhide: [navigation, toc]\n", 1)  # lines have 120 columns
        return f"source/{path}.md", f"{wide}# {file.name}\n\n`{path}`\n\n{fence}"
    return f"source/{path}", file.read_text()
