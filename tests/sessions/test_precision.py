"""`session(precision=...)`: torch's autocast on every number of ranks, with a loss scale for fp16."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.errors import codes
from tests.run_script import run_script

pytestmark = pytest.mark.sample(2)

SCRIPT = Path(__file__).with_name("precise.py")


def found(folder: Path, ranks: int, kind: str, *words: str) -> dict[str, Any]:
    done = run_script(ranks, SCRIPT, kind, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads((folder / f"{kind}.json").read_text()), "printed": done.stdout}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["weights"], other["weights"], strict=True)
    return max(abs(a - b) for a, b in pairs) / max(map(abs, other["weights"]))


def test_bf16_on_one_rank_has_the_bits_of_autocast_in_a_plain_loop(tmp_path: Path) -> None:
    session = found(tmp_path, 1, "session", "bf16")
    plain = found(tmp_path, 1, "plain", "bf16")
    assert (session["losses"], session["digest"]) == (plain["losses"], plain["digest"])
    assert session["digest"] != found(tmp_path, 1, "plain", "fp32")["digest"]


@pytest.mark.ranks
def test_bf16_and_fp16_have_one_result_on_one_and_two_ranks_close_to_fp32(tmp_path: Path) -> None:
    plain = found(tmp_path, 1, "plain", "fp32")
    for precision in ("bf16", "fp16"):
        one, two = (found(tmp_path, ranks, "session", precision, "exact") for ranks in (1, 2))
        assert one["digest"] == two["digest"] and one["types"] == ["torch.float32"]
        assert 1e-6 < distance(one, plain) < 0.02


@pytest.mark.ranks
def test_fp16_scales_the_loss_skips_an_overflow_and_saves_the_scale(tmp_path: Path) -> None:
    folders = tmp_path / "whole", tmp_path / "resumed"
    for folder in folders:
        folder.mkdir()
    whole = found(folders[0], 2, "scaled", "fp16")
    assert whole["moved"] == [True] * 3 + [False] + [True] * 4
    assert whole["printed"].count("32768") == 1  # the scale after the overflow
    (folders[1] / "stop").touch()
    assert run_script(2, SCRIPT, "scaled", "fp16", cwd=folders[1]).returncode == 1
    resumed = found(folders[1], 1, "scaled", "fp16")
    assert resumed["moved"] == [True] * 2 and distance(resumed, whole) < 1e-3
    manifest = json.loads(next((folders[1] / "run/checkpoints").glob("step-00000008/manifest.json")).read_text())
    assert manifest["manifest"]["scalars"]["loop"]["parts"][0]["loss_scale"] == [32768.0, 4, 1]
    refused = run_script(1, SCRIPT, "scaled", "fp32", cwd=folders[1])
    assert refused.returncode == 2 and codes(refused.stderr) == ["another-run"]


def test_auto_is_fp32_without_bf16_and_names_the_reason(tmp_path: Path) -> None:
    session = found(tmp_path, 1, "session", "auto")
    assert session["digest"] == found(tmp_path, 1, "plain", "fp32")["digest"]
    assert '"auto": fp32' in session["printed"]


@pytest.mark.parametrize(
    ("kind", "precision", "code"), [("scaler", "fp16", "loss-scaled-twice"), ("session", "tf32", "precision-not-there")]
)
def test_it_is_an_error_before_the_first_step(tmp_path: Path, kind: str, precision: str, code: str) -> None:
    done = run_script(1, SCRIPT, kind, precision, cwd=tmp_path)
    assert done.returncode == 2 and codes(done.stderr) == [code] and not (tmp_path / "session.json").exists()
