"""Several optimizers of one model, one of which needs whole matrices: the result of one process, also resumed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.run_script import run_script
from tests.sessions import muon

SIZES = (1, 2, 3)
NAMES = [*muon.STRATEGIES, *map(" ".join, muon.RESUMED)]
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The weights of all loops on 1, 2 and 3 ranks, and what one rank has printed."""
    folder, printed = tmp_path_factory.mktemp("muon"), ""
    for size in SIZES:
        (folder / str(size)).mkdir()
        done = run_script(size, Path(muon.__file__), folder / str(size), cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = printed or done.stdout
    return folder, printed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_muon_and_adamw_equal_one_process_under_every_strategy(found: tuple[Path, str], name: str) -> None:
    folder, _ = found
    wanted = load_file(folder / "1" / "alone 1")
    for size in SIZES:
        weights = load_file(folder / str(size) / f"{name} {size}")
        assert weights.keys() == wanted.keys()
        assert max(float((weights[key] - value).abs().max()) for key, value in wanted.items()) < 1e-9, size


@pytest.mark.slow
def test_exact_and_zero_have_the_same_bits_at_every_world_size(found: tuple[Path, str]) -> None:
    folder, _ = found
    wanted = load_file(folder / "1" / "exact 1")
    for name, size in ((name, size) for name in ("exact", "zero") for size in SIZES):
        weights = load_file(folder / str(size) / f"{name} {size}")
        assert all(torch.equal(weights[key], value) for key, value in wanted.items()), (name, size)


@pytest.mark.slow
def test_experts_that_most_batches_do_not_use_are_trained_as_on_one_process(found: tuple[Path, str]) -> None:
    folder, _ = found
    wanted = load_file(folder / "1" / "experts exact 1")
    for size, strategy in ((size, name) for size in SIZES for name in ("exact", "zero", "fsdp")):
        weights = load_file(folder / str(size) / f"experts {strategy} {size}")
        for key, value in wanted.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-9, msg=f"{key} {strategy} {size}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_gradients_that_only_the_other_optimizer_clears_add_up_also_after_a_resume(
    found: tuple[Path, str], number: int
) -> None:
    folder, _ = found
    wanted = load_file(folder / "1" / f"cleared {number} 3 1")
    for stop, size in ((stop, size) for stop in (1, 2, 3) for size in SIZES):
        weights = load_file(folder / str(size) / f"cleared {number} {stop} {size}")
        assert all(torch.equal(weights[key], value) for key, value in wanted.items()), (stop, size)


@pytest.mark.slow
def test_optimizers_that_do_not_go_together_are_refused(found: tuple[Path, str]) -> None:
    line = next(line for line in found[1].splitlines() if line.startswith("refused"))
    assert line.split()[1:] == ["optimizer-added-later", "parameters-trained-twice", "schedulers-of-optimizers"]


@pytest.mark.slow
def test_a_resume_with_other_optimizers_is_refused_and_closures_are_called(found: tuple[Path, str]) -> None:
    (line,) = [line for line in found[1].splitlines() if line.startswith("resumed")]
    assert line.split()[1:] == ["optimizer-class-differs", "optimizer-missing"]
    assert "losses [3, 3]" in found[1]


@pytest.mark.slow
def test_the_code_of_the_documentation_trains(found: tuple[Path, str]) -> None:
    (line,) = [line for line in found[1].splitlines() if line.startswith("documentation:")]
    assert line.split()[1] == "4" and line.endswith("True")
