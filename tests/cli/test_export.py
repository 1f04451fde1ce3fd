"""`paceline export`: the weights of real runs as plain torch and Hugging Face take them, and what is refused."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.checkpoint_harness import saved
from tests.cli.tasks_to_export import Odd, Wrapped
from tests.errors import raises
from tests.sessions.test_resume import start

from paceline.cli.checkpoint import export
from paceline.errors import UsageError
from paceline.runs.reading import list_names
from paceline.runs.summary import Summary, read_summary, write_summary
from paceline.train.weights import read_weight_file, save

TASK = Path(__file__).with_name("tasks_to_export.py")


def digest(shown: str) -> str:
    return shown.rsplit("weights ", 1)[1].strip()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was broken off, with the checkpoints of steps 1, 2 and 3."""
    saved(tmp_path / "run" / "checkpoints", 1, 2, 3)
    (tmp_path / "run" / "config.toml").write_text('task = "loop.py"\n')
    return tmp_path / "run"


@pytest.fixture
def whole(run: Path) -> Path:
    weights = Odd().state_dict()
    save(weights, run / "model.safetensors")
    from paceline.checkpoint.shards import hash_tensors

    write_summary(run, Summary("t", 0, weights_sha256=hash_tensors(weights)))
    return run


# ---- which weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "step"), [([], 3), (["--step", "2"], 2)])
def test_of_a_run_that_was_broken_off_the_newest_checkpoint_is_taken_or_the_one_named(
    run: Path, tmp_path: Path, words: list[str], step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "w.safetensors"
    assert export([str(run), "-o", str(out), *words]) == 0
    assert f"step {step} of run: " in capsys.readouterr().out
    data = b"".join(
        (run / "checkpoints" / f"step-0000000{step}" / f"shard-{rank}-of-2.safetensors").read_bytes()[128:]
        for rank in (0, 1)
    )
    assert load_file(out)["w"].numpy().tobytes() == data


def test_a_damaged_one_is_passed_over_and_told_and_refused_where_it_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoints" / "step-00000003" / "shard-0-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert export([str(run), "-o", str(tmp_path / "w.pt")]) == 0
    shown = capsys.readouterr()
    assert "step 2 of run" in shown.out and re.search("step-00000003 .*: shard-0-of-2", shown.err)
    with raises("step-not-exported", which="the checkpoint of step 3 is damaged: "):
        export([str(run), "--step", "3", "-o", str(tmp_path / "other.pt")])
    assert list_names(tmp_path) == ["run", "w.pt"]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_the_final_weights_have_every_name_and_the_digest_of_the_summary(
    whole: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "head.weight" not in load_file(whole / "model.safetensors")  # stored once
    assert export([str(whole), "-o", str(tmp_path / name)]) == 0
    summary = read_summary(whole)
    assert summary is not None and digest(capsys.readouterr().out) == summary.weights_sha256
    found = load_file(tmp_path / name) if name == "w.safetensors" else torch.load(tmp_path / name, weights_only=True)
    Odd().load_state_dict(found, strict=True)


def test_weights_that_are_not_those_of_the_summary_are_refused(whole: Path, tmp_path: Path) -> None:
    save(Odd().state_dict(), whole / "model.safetensors")
    with raises("weights-damaged", name="model.safetensors"):
        export([str(whole), "-o", str(tmp_path / "w.pt")])
    (whole / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UsageError, match=r"model.safetensors is damaged"):
        export([str(whole), "-o", str(tmp_path / "w.pt")])


def test_the_best_weights_of_a_run_are_exported_by_their_name(whole: Path, tmp_path: Path) -> None:
    with raises("unknown-name", value="model-best.safetensors", allowed=["model.safetensors"]):
        export([str(whole), "--step", "best", "-o", str(tmp_path / "w.pt")])
    shutil.copy(whole / "model.safetensors", whole / "model-best.safetensors")
    assert export([str(whole), "--step", "best", "-o", str(tmp_path / "w.pt")]) == 0
    assert torch.load(tmp_path / "w.pt").keys() == Odd().state_dict().keys()


def hugging(words: str, code: str) -> Any:
    return pytest.param(f"run -o hf --format huggingface{words}", code, {}, marks=pytest.mark.needs("transformers"))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "fields"),
    [
        ("nowhere -o w.pt", "unknown-name", {"kind": "run", "value": "nowhere"}),
        ("run -o w.pt --step 7", "unknown-name", {"value": "7", "allowed": ["1", "2", "3"]}),
        ("run -o w.pt --model 2", "unknown-name", {"kind": "model", "value": "2", "allowed": ["1"]}),
        ("run -o w.pt --model 0", "below-one", {"setting": "model", "value": 0}),
        ("run -o run", "out-is-a-folder", {"setting": "out"}),
        ("run -o nowhere/w.pt", "out-folder-missing", {"setting": "out"}),
        ("run -o there.pt", "out-exists", {"out": Path("there.pt")}),
        ("run -o w.pt --config run", "config-without-huggingface", {}),
        ("run -o there.pt --format huggingface", "out-not-a-folder", {"value": Path("there.pt")}),
        ("run -o run --format huggingface", "out-exists", {"out": Path("run")}),
        ("run -o there.pt --format peft", "out-not-a-folder", {"value": Path("there.pt")}),
        ("run -o adapter --format peft", "run-without-adapter", {"model": 1}),
        hugging("", "session-without-model"),
        hugging(" --config run", "no-hf-config"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_written(
    run: Path, tmp_path: Path, words: str, code: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pt").write_text("precious")
    before = list_names(tmp_path)
    with raises(code, **fields):
        export(words.split())
    assert list_names(tmp_path) == before and (tmp_path / "there.pt").read_text() == "precious"


def test_a_file_is_replaced_when_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("old")
    assert export([str(run), "-o", str(tmp_path / "w.pt"), "--overwrite"]) == 0
    assert [*torch.load(tmp_path / "w.pt")] == ["w"]


@pytest.mark.parametrize("final", [False, True])
def test_a_folder_that_others_can_write_is_believed_by_trust_only(
    run: Path, tmp_path: Path, final: bool, request: pytest.FixtureRequest
) -> None:
    if final:
        request.getfixturevalue("whole")
    run.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by all users"):
        export([str(run), "-o", str(tmp_path / "w.pt")])
    assert export([str(run), "-o", str(tmp_path / "w.pt"), "--trust"]) == 0


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "ranks"), [("exact", 3), ("zero", 2), ("fsdp", 2), ("bucketed", 2)])
def test_the_last_checkpoint_gives_the_bits_that_the_run_has_written(
    paceline, tmp_path: Path, strategy: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--virtual-ranks", 5, "--global-batch", 12, "--epochs", 2, "--run-dir", tmp_path / "run")
    done = paceline("train", f"{TASK}:odd", "--strategy", strategy, *words, ranks=ranks)
    assert done.returncode == 0, done.stderr
    run, out = tmp_path / "run", tmp_path / "w.safetensors"
    assert export([str(run), "--step", "4", "-o", str(out)]) == 0
    summary, final, found = (
        read_summary(run),
        read_weight_file(run / "model.safetensors", require_trusted_owner=True),
        load_file(out),
    )
    assert summary is not None and digest(capsys.readouterr().out) == summary.weights_sha256
    assert final.keys() == found.keys() and all(torch.equal(final[name], found[name]) for name in final)
    Odd().load_state_dict(found, strict=True)
    assert export([str(run), "--step", "2", "-o", str(out), "--overwrite"]) == 0
    assert digest(capsys.readouterr().out) != summary.weights_sha256


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_each_model_of_a_session_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert start(1, run, 13, "raise").returncode == 1
    assert export([str(run), "-o", str(tmp_path / "early.pt"), "--model", "2"]) == 0
    assert "step 13 of run: 2 " in capsys.readouterr().out
    assert start(2, run).returncode == 0
    for number, name in ((1, "model.safetensors"), (2, "model-2.safetensors")):
        final = read_weight_file(run / name, require_trusted_owner=True)
        for words in ([], ["--step", "24"]):
            out = tmp_path / f"{number}-{len(words)}.safetensors"
            assert export([str(run), "--model", str(number), "-o", str(out), *words]) == 0
            found = load_file(out)
            assert found.keys() == final.keys() and all(torch.equal(found[n], final[n]) for n in final)
    with pytest.raises(UsageError, match=r"unknown model '3'.*Choose from: 1, 2"):
        export([str(run), "--model", "3", "--step", "24", "-o", str(tmp_path / "3.pt")])


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.timeout(360)
def test_hugging_face_reads_what_was_exported_for_it(
    paceline, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or what transformers imports sets it
    run, out = tmp_path / "run", tmp_path / "hf"
    words = ("--strategy", "zero", "--global-batch", 12, "--steps", 2, "--run-dir", run)
    done = paceline("train", f"{TASK}:wrapped", *words, env={"HF_HUB_OFFLINE": "1"}, ranks=2)
    assert done.returncode == 0, done.stderr
    assert export([str(run), "--format", "huggingface", "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "attribute lm " in shown and shown.count(": scale\n") == 1
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values())
    final = read_weight_file(run / "model.safetensors", require_trusted_owner=True)
    state = model.state_dict()
    assert {f"lm.{name}" for name in state} == final.keys() - {"scale"}
    assert all(torch.equal(tensor, final[f"lm.{name}"]) for name, tensor in state.items())
    assert model.lm_head.weight is model.transformer.wte.weight

    again = tmp_path / "again"
    assert export([str(run), "--format", "huggingface", "--config", str(out), "-o", str(again)]) == 0
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    (out / "mine.txt").write_text("precious")
    assert export([str(run), "--format", "huggingface", "-o", str(out), "--overwrite"]) == 0
    assert (out / "mine.txt").read_text() == "precious"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []  # noqa: PTH208
    with pytest.raises(UsageError, match=r"the model of .*odd holds 0 Hugging Face models, not one"):
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace(":wrapped", ":odd"))
        export([str(run), "--format", "huggingface", "-o", str(tmp_path / "odd")])
    save({name: tensor for name, tensor in Wrapped().state_dict().items() if "wpe" not in name}, run / "part")
    os.replace(run / "part", run / "model-best.safetensors")  # noqa: PTH105
    with raises("no-hf-model-in-weights"):
        words = ("--format", "huggingface", "--config", str(again), "--step", "best")
        export([str(run), *words, "-o", str(tmp_path / "odd")])
