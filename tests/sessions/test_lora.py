"""Adapters of peft: trained, killed and resumed as in one process, saved alone, and bound to their base weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.run_script import run_script
from tests.sessions.soak_lora import ENV, killed_and_resumed, problems

from paceline.cli.checkpoint import export

ADAPTERS = Path(__file__).with_name("adapters.py")
ONE_IMPORTS_PEFT = """
import sys
import torch
import paceline

s = paceline.session(seed=0)
if s.rank == 0:
    import peft
model = torch.nn.Linear(2, 1)
s.prepare(model, torch.optim.SGD(model.parameters()))
print("peft" in sys.modules)
s.close()
"""
EXPECTED = {
    "no adapter": ("no-adapter", ""),
    "trained outside": ("adapter-incomplete", "second.weight"),
    "statistics": ("adapter-incomplete", "norm.running_mean"),
    "adalora": ("adapter-needs-whole-weights", ""),
    "another base": ("adapter-of-another-base", ""),
    "another base, named": ("adapter-of-another-base", ""),  # the adapter has the name of a module
    "another dtype": ("adapter-of-another-base", ""),
}  # of adapters.py: the code of an error, and a part of the names in it


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("transformers", "peft")
@pytest.mark.parametrize(
    ("model", "strategy", "ranks"), [("llama", "fsdp", 2), ("bert", "fsdp", 3), ("gpt2", "zero", 2)]
)
def test_a_killed_run_restores_the_whole_adapter_and_sends_no_frozen_weights(
    model: str, strategy: str, ranks: int, tmp_path: Path
) -> None:
    """`make soak-lora` runs the other cases."""
    facts = killed_and_resumed(model, strategy, ranks, tmp_path / "run")
    assert problems(facts, strategy, ranks) == [], facts


@pytest.mark.ranks
@pytest.mark.needs("peft")
def test_ranks_prepare_a_model_if_only_one_has_imported_peft(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ONE_IMPORTS_PEFT)
    done = run_script(2, "script.py", cwd=tmp_path, env=ENV)
    assert (done.returncode, done.stdout) == (0, "True\nFalse\n"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("transformers", "peft")
def test_an_adapter_is_saved_alone_if_it_is_complete_and_loaded_onto_its_base_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_script(2, ADAPTERS, cwd=tmp_path, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("base weights" in line for line in done.stdout.splitlines() if line.startswith("NOTE: "))
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: code for name, (code, _) in EXPECTED.items()} == {name: found[name][0] for name in EXPECTED}
    assert all(part in found[name][1] for name, (_, part) in EXPECTED.items()), found
    assert found["same outputs"]

    run, name = tmp_path / "run", "adapter_model.safetensors"
    saved = load_file(tmp_path / "saved" / name)
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in saved} == {"lora_A", "lora_B", "second"}
    for words in ([], ["--step", "2"]):  # the final weights, and those of the checkpoint
        out = tmp_path / f"exported-{len(words)}"
        assert export([str(run), "--format", "peft", "-o", str(out), *words]) == 0
        for folder in (out, run / "adapter"):
            tensors = load_file(folder / name)
            assert tensors.keys() == saved.keys() and all(torch.equal(tensors[key], saved[key]) for key in saved)
            texts = [(path / "adapter_config.json").read_text() for path in (folder, tmp_path / "saved")]
            assert json.loads(texts[0]) == json.loads(texts[1])
            with safe_open(folder / name, "pt") as file, safe_open(tmp_path / "saved" / name, "pt") as other:
                assert file.metadata() == other.metadata() and len(file.metadata()["paceline.base_sha256"]) == 64
    assert not (run / "model.safetensors").exists()
    assert export([str(run), "-o", str(tmp_path / "whole.safetensors")]) == 0
    whole, weights = load_file(tmp_path / "whole.safetensors"), torch.load(tmp_path / "weights.pt")
    assert whole.keys() == weights.keys() and all(torch.equal(whole[key], weights[key]) for key in weights)
