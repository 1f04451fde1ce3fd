"""The examples of recipes.md, hugging-face.md, kubernetes.md and ci.md run, and the index of examples is complete."""

import contextlib
import io
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import warm
from tests.run_script import run_script

from paceline.cli import make_parser, train
from paceline.cli.watchover import split_options_and_script

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "docs" / f"{name}.md" for name in (
    "install", "start/gpus", "existing-script", "recipes", "hugging-face", "from-lightning", "ci", "support",
    "launch/kubernetes",
)]  # fmt: skip
NUMBERS = re.compile(r"^.*(?:loss|best) [\d.e-]+.*$", re.MULTILINE)


def numbers(size: int, script: str, *words: object, cwd: Path) -> list[str]:
    """The lines with a loss that rank 0 prints."""
    done = run_script(size, EXAMPLES / script, *words, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return NUMBERS.findall(done.stdout)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_python_of_a_page_is_included_from_a_file_that_is_run(page: Path) -> None:
    text = page.read_text()
    included = re.findall(r"<!-- (?:code|diff) \S.*? -->\n\n```(?:python|diff)\n", text)
    assert len(included) == len(re.findall(r"^ *```(?:python|diff)\n", text, re.MULTILINE))


def test_the_index_of_examples_has_every_script() -> None:
    index = (EXAMPLES / "README.md").read_text()
    scripts = [*EXAMPLES.glob("*.*"), *EXAMPLES.glob("from/*.py"), *EXAMPLES.glob("ci/*")]
    missing = [path.name for path in scripts if f"({path.relative_to(EXAMPLES)})" not in index]
    assert missing == ["README.md"]
    for target in re.findall(r"\]\(([^)#\s]+)", index):
        assert (EXAMPLES / target).exists(), target


@pytest.mark.slow
@pytest.mark.ranks
def test_the_recipes_have_one_result_on_one_rank_and_on_two(tmp_path: Path) -> None:
    one, two = (numbers(size, "recipes.py", "--epochs", 3, cwd=tmp_path) for size in (1, 2))
    assert len(one) == 4 and one == two
    assert (tmp_path / "best.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.ranks
def test_the_recipes_stop_early_in_bf16(tmp_path: Path) -> None:
    words = ("--strategy", "exact", "--precision", "bf16", "--patience", 1, "--epochs", 40)
    epochs = numbers(2, "recipes.py", *words, cwd=tmp_path)
    assert 2 < len(epochs) < 40


@pytest.mark.ranks
def test_the_loop_from_lightning_has_one_result_on_one_rank_and_on_two(tmp_path: Path) -> None:
    found = list[list[str]]()
    for size in (1, 2):
        (folder := tmp_path / str(size)).mkdir()
        found.append(numbers(size, "from/lightning.py", cwd=folder))
        assert (folder / "runs" / "lightning" / "best.safetensors").is_file()
    assert len(found[0]) >= 3 and found[0] == found[1]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("transformers")
def test_the_tiny_bert_has_one_result_on_one_rank_and_on_two(tmp_path: Path) -> None:
    one, two = (numbers(size, "hf_tiny.py", cwd=tmp_path) for size in (1, 2))
    assert len(one) == 4 and one == two


FINE_TUNE = """
import sys
sys.path.insert(0, {examples!r})
import finetune
common = ["--model", "model", "--data", "train.jsonl", "--epochs", "1"]
finetune.main([*common, "--strategy", "exact", "--out", "whole"])
for strategy in ("bucketed", "exact", "zero"):
    finetune.main([*common, "--lora", "--strategy", strategy, "--out", "lora-" + strategy])
for start in range(2):  # the second finds the run finished
    finetune.main([*common, "--strategy", "exact", "--out", "again", "--run-dir", "runs/again"])
"""


def make_model(folder: Path) -> None:
    """A tiny BERT with random weights and a tokenizer of a few words, as `from_pretrained` reads them."""
    import tokenizers
    import torch
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "good", "bad", "day", "was", "it", "a"]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.needs("transformers", "peft")
def test_fine_tuning_has_one_result_on_one_rank_and_on_two_also_with_lora(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    script = tmp_path / "script.py"
    script.write_text(FINE_TUNE.format(examples=str(EXAMPLES)))
    found = list[list[float]]()
    for size in (1, 2):
        folder = tmp_path / str(size)
        make_model(folder / "model")
        rows = [{"text": f"it was a {word} day", "label": int(word == "good")} for word in ("good", "bad") * 40]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = run_script(size, script, cwd=folder, env={"HF_HUB_OFFLINE": "1"}, timeout=450)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append([float(loss) for loss in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)])
    one, two = found
    assert len(one) == 5 and one == pytest.approx(two, abs=2e-6)
    assert len({*one[1:4]}) == 1 and one[0] != one[1]  # one result of LoRA with all strategies
    assert one[4] == one[0] and (tmp_path / "2" / "again" / "tokenizer.json").is_file()
    adapters = [load_file(tmp_path / "2" / f"lora-{name}" / "adapter_model.safetensors") for name in ("exact", "zero")]
    assert adapters[0] and all("lora" in name or "classifier" in name for name in adapters[0])
    assert all(bool((adapters[0][name] == adapters[1][name]).all()) for name in adapters[0])


def commands_of(manifest: Any) -> Iterator[list[str]]:
    """The commands of all containers."""
    if isinstance(manifest, dict) and "image" in manifest:
        words = [str(word) for word in manifest["command"]]
        shell = words[:2] == ["sh", "-c"]
        yield shlex.split(words[2].removeprefix("exec ").replace("${HOSTNAME##*-}", "0")) if shell else words
    inner = manifest.values() if isinstance(manifest, dict) else manifest if isinstance(manifest, list) else ()
    for value in inner:
        yield from commands_of(value)


@pytest.mark.needs("yaml")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("kubernetes/*.yaml")), ids=lambda path: path.stem)
def test_the_commands_of_a_manifest_are_valid(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml
    from torch.distributed.run import get_args_parser

    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "own_task.py", "my_task.py")
    documents = [*yaml.safe_load_all(path.read_text())]
    assert all({"apiVersion", "kind", "metadata"} <= {*document} for document in documents)
    commands = [words for document in documents for words in commands_of(document)]
    assert commands
    for program, *words in commands:
        if program == "torchrun":
            parsed = get_args_parser().parse_args(words)
            assert (parsed.module, parsed.training_script) == (True, "paceline")
            watch, *words = parsed.training_script_args
            own, script = split_options_and_script(words)
            assert watch == "watchover" and script == ["train.py"]
            assert make_parser("watchover").parse(own).end
        else:
            assert [program, words[0]] == ["paceline", "train"]
            place = words.index("--run-dir") + 1
            words[place] = str(tmp_path / "run")
            with contextlib.redirect_stdout(io.StringIO()):
                assert train.main([*words[1:], "--dry-run"]) == 0


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("yaml")
@pytest.mark.timeout(600)
def test_the_commands_of_the_workflow_run(tmp_path: Path) -> None:
    import yaml

    workflow = yaml.safe_load((EXAMPLES / "ci" / "paceline.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [shlex.split(step["run"]) for step in job["steps"] if step.get("run", "").startswith("paceline ")]
    assert [words[1] for words in commands] == ["launch", "verify"]
    shutil.copy(EXAMPLES / "existing_ddp.py", tmp_path / "train_ddp.py")
    trained, _, evaluated = (EXAMPLES / "own_loop.py").read_text().partition("        model.eval()\n")
    assert evaluated
    loop = textwrap.indent(trained, "    ")  # docs/ci.md says why without the evaluation
    (tmp_path / "train_loop.py").write_text(f"def main():\n{loop}")
    (tmp_path / "data").symlink_to(ROOT / "src" / "paceline" / "data" / "mnist")
    for words in commands:
        done = warm.run(["-m", *words], cwd=tmp_path, timeout=270, ranks=True)
        assert done.returncode == 0, done.stdout + done.stderr
