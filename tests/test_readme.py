"""What the README shows runs as printed."""

import json
import re
from pathlib import Path

import pytest
from tests import warm
from tests.run_script import run_script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def scripts() -> tuple[str, str]:
    """The loop of one process, and the loop with a session, by the lines of the README's diff."""
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert diff is not None
    lines = diff[1].splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != left) for left in "+-")  # pyright: ignore


@pytest.mark.slow
@pytest.mark.ranks
def test_the_loop_has_the_weights_of_one_process(tmp_path: Path) -> None:
    before, after = scripts()
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "loop.py").write_text(after)
    plain = warm.run((tmp_path / "before.py",))
    right = float(plain.stdout.split()[-1])
    for ranks in (1, 2):
        done = run_script(ranks, "loop.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = [float(line) for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d+", line)]
        assert found == pytest.approx([right] * ranks, rel=1e-5)


def test_it_fits_on_a_page() -> None:
    assert len(README.splitlines()) <= 110
    assert len(re.findall(r"!\[[^\]]{20,}\]\(docs/pictures/[\w-]+\.png\)", README)) == 1


def test_the_comparison_is_that_of_its_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "one_process.json").read_text())
    rows = [line.split("|")[2:6] for line in README.splitlines() if "results/one_process.json" in line]
    for case, row in zip(("last batch", "last window"), rows, strict=False):
        for name, cell in zip(("DDP", "Accelerate", "Fabric", "paceline"), row, strict=True):
            assert float(cell) == pytest.approx(record[name][case], rel=0.05)
    assert [cell.split()[0].strip(",") for cell in rows[2]] == ["no", "no", "no", "yes"]
    assert [record[name]["bits"] for name in ("DDP", "Accelerate", "Fabric", "paceline")] == [False] * 3 + [True]
