"""What `compare` and `scale` share: the training that flags describe, refusals before anything starts, the results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from tests.errors import raises
from tests.lab.typed import typed

from paceline.cli import main, measure
from paceline.cli.measure import MeasurementConfig, check_measurement_options, output_results, train_config
from paceline.config.settings import TrainConfig, config_to_toml
from paceline.lab.compare import make_strategy_rows
from paceline.lab.measurement import Candidate, Measurement
from paceline.lab.rounds import MeasuredRounds

TASKS = Path(__file__).parents[1] / "lab" / "tasks_to_measure.py"


def test_flags_win_over_the_file_and_a_task_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TASKS.parent)
    (tmp_path / "c.toml").write_text('task = "mnist-cnn"\nstrategy = "ddp"\n[optimizer]\noptimizer = "sgd"\nlr = 0.5\n')
    found = train_config(
        f"{TASKS.name}:tied", MeasurementConfig(config=tmp_path / "c.toml", optimizer="adamw"), num_workers=2
    )
    assert (found.task, found.strategy) == (f"{TASKS}:tied", None)
    assert (found.optimizer.optimizer, found.optimizer.lr, found.data.num_workers) == ("adamw", 0.5, 2)
    plain = train_config(f"{TASKS.name}:tied", MeasurementConfig())
    assert config_to_toml(plain) == config_to_toml(TrainConfig(task=f"{TASKS}:tied"))


@pytest.mark.parametrize("command", ["compare", "scale"])
def test_both_have_the_same_flags_for_how_it_is_measured(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    said = capsys.readouterr().out
    for name in MeasurementConfig.__dataclass_fields__:
        assert f"  --{name.replace('_', '-')}" in said, name
    assert "--how" not in said


@pytest.mark.parametrize(("out", "code"), [("none/x.json", "out-folder-missing"), (".", "out-is-a-folder")])
def test_where_results_cannot_be_written_is_told_before_they_are_measured(tmp_path: Path, out: str, code: str) -> None:
    with raises(code, setting="out"):
        check_measurement_options(MeasurementConfig(out=tmp_path / out))
    check_measurement_options(MeasurementConfig(out=tmp_path / "x.json"))


class Found(msgspec.Struct):
    number: int


def test_results_are_written_and_printed_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_results(Found(7), MeasurementConfig(out=tmp_path / "x.json"), lambda: print("a table"))
    assert capsys.readouterr().out == "a table\n"
    assert json.loads((tmp_path / "x.json").read_text()) == {"number": 7}
    output_results(Found(8), MeasurementConfig(json=True), lambda: print("a table"))
    assert json.loads(capsys.readouterr().out) == {"number": 8}


def chunk(ranks: int) -> Measurement:
    return Measurement(
        Candidate(f"ddp-{ranks}", "ddp", 8, 1), ranks, 8 * ranks, 80, 1.0, 1.0, 0.1, 2.5, "", 100, None, None
    )


def test_more_ranks_than_cores_are_said_and_not_refused() -> None:
    found = MeasuredRounds([[chunk(1), chunk(2), chunk(4)]])
    crowded, launch = measure.scaling_notes([1, 2, 4], found, 2, 1)
    assert "4 threads on 2 cores" in crowded
    assert launch.endswith("2.5 s for 1, 2.5 s for 2, 2.5 s for 4")
    assert len(measure.scaling_notes([1, 2], found, 2, 1)) == 1
    rows = make_strategy_rows(found.rounds, "ddp", steps=10)
    assert len(measure.comparison_notes([row for row in rows if row.world_size < 4], 2, 1)) == 1
    assert "4 threads on 2 cores" in measure.comparison_notes(rows, 2, 1)[1]


def test_what_was_not_measured_is_a_note_of_either_command_once() -> None:
    noted = [msgspec.structs.replace(chunk(ranks), notes=("a stream",)) for ranks in (1, 2)]
    found = MeasuredRounds([noted, noted])
    assert found.notes() == ["a stream"]
    assert measure.scaling_notes([1, 2], found, 2, 1)[-1] == "a stream"
    hot, hotter = (msgspec.structs.replace(chunk(2), gpus={1: f"GPU 1: hot ({mhz} MHz)"}) for mhz in (405, 400))
    (note,) = MeasuredRounds([[chunk(1), hot], [chunk(1), hotter], [chunk(1), chunk(2)]]).notes()
    assert note.startswith("rank 1 of 2, in 2 of 3 ") and note.endswith("GPU 1: hot (405 MHz)")
    compared = measure._comparison(measure.CompareConfig("mnist-cnn"), found, [], 8, None, 2, 1)  # pyright: ignore[reportPrivateUsage]
    assert compared.notes[-1] == "a stream"


@pytest.mark.parametrize(
    ("command", "ranks"), [(measure.scale, "--ranks=1,2"), (measure.compare_strategies, "--nproc=2")]
)
def test_several_processes_share_a_gpu_over_gloo_only(
    command: Callable[[list[str]], int], ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):  # noqa: N818
        pass

    def begin(groups: object, settings: TrainConfig, how: object, *, memory: bool) -> NoReturn:
        assert settings.launch.backend == "gloo"
        raise Begun

    monkeypatch.setattr(measure.options, "usable_gpus", lambda device: 1)
    monkeypatch.setattr(measure, "measure_candidate_groups", begin)
    with pytest.raises(Begun):
        command(["mnist-cnn", ranks, "--backend", "gloo"])
    with raises("too-few-gpus", nproc=2, gpus=1):
        command(["mnist-cnn", ranks])


def test_an_empty_network_is_refused_as_any_that_cannot_be_read() -> None:
    with raises("network-not-understood", value=""):
        measure.scale(["mnist-cnn", "--network", ""])


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_precision_that_the_processor_lacks_ends_a_comparison_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    how = ("--precision", "bf16", "--nproc", 2, "--rounds", 1, "--steps", 2, "--warmup", 3, "--device", "cpu")
    run = typed(tmp_path, "compare", f"{TASKS}:tied", *how, timeout=300)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.count("--precision bf16: ") == 1
