"""Type the commands of docs/ladder and docs/start, and write what comes out into the pages: `python tools/typed.py`.

    python tools/typed.py [PAGE ...]        only these, by name: manual exact

A page has `<!-- transcript NAME -->` before each block that is made here; lines that begin with `$ ` are typed, one
after the other, in a folder with a copy of examples/. (docs/launch/transcripts.py does it on several hosts.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "ladder").glob("*.md")) + sorted((ROOT / "docs" / "start").glob("*.md"))
BLOCK = re.compile(r"(<!-- transcript [\w-]+ -->\n+```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
HOME = "/home/me/project"  # in place of the folder
LONGEST_SECONDS = 300


def typed(commands: list[str]) -> str:
    """The commands, each with what it prints."""
    out: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        for command in commands:
            ran = subprocess.run(
                ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, timeout=LONGEST_SECONDS, check=False,
            )  # fmt: skip
            said = ran.stdout.replace(str(Path(folder).resolve()), HOME).strip("\n")
            out.append(f"$ {command}\n" + (f"{said}\n" if said else ""))
    return "\n".join(out)


def main(names: list[str]) -> int:
    """Write the pages."""
    for page in PAGES:
        if not names or page.stem in names:
            text = page.read_text()
            page.write_text(BLOCK.sub(lambda m: m[1] + typed(re.findall(r"^\$ (.*)$", m[2], re.M)) + m[3], text))
            print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
