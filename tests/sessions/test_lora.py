"""LoRA adapters of peft train under every strategy as in one process, and peft loads them."""

import json
from pathlib import Path

import pytest
from tests.run_script import run_script

SCRIPT = Path(__file__).with_name("lora.py")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("transformers", "peft")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_an_adapter_is_that_of_one_process_under_every_strategy(model: str, ranks: int, tmp_path: Path) -> None:
    done = run_script(ranks, SCRIPT, model, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[float]] = json.loads((tmp_path / "lora.json").read_text())
    assert [*found] == ["bucketed", "exact", "zero", "fsdp"]
    assert all(of_weights < 1e-12 and of_adapter == 0 for of_weights, of_adapter in found.values()), found
