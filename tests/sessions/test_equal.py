"""A loop in a session computes what it computes on one device without paceline, at every world size."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import warm
from tests.sessions import loops
from torch import Tensor

SIZES = (1, 2)
TOLERANCE = 1e-12


# the first test waits for the fixture, 35 sessions on one rank and on two; test_classic.py is the quick sample
pytestmark = [pytest.mark.timeout(720), pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What sessions of each kind have computed on one rank and on two."""
    folder = tmp_path_factory.mktemp("loops")
    for size in SIZES:
        words = ("-m", "paceline", "launch", "--nproc", str(size), "--run-dir", str(folder / f"run-{size}"), "--")
        done = warm.run((*words, loops.__file__, str(folder)), ranks=True, cwd=folder, timeout=540)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def weights(folder: Path, kind: str, loop: loops.Loop, size: int) -> dict[str, Tensor]:
    return load_file(loops.where(folder, kind, loop, size))


CASES = [("plain", loop) for loop in loops.EVERYWHERE + loops.ONE_BODY] + [("dealt", loop) for loop in loops.DEALT]
CASES += [("exact", loop) for loop in loops.EVERYWHERE] + [("zero", loop) for loop in (loops.classic, loops.tokens)]
CASES += [("ddp", loops.classic), ("ddp-dealt", loops.classic), ("dealt-unevenly", loops.gan)]
CASES += [("fsdp", loop) for loop in loops.CUT] + [("fsdp-dealt", loop) for loop in loops.DEALT]


@pytest.mark.parametrize(("kind", "loop"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_the_single_device_original_is_equalled(found: Path, kind: str, loop: loops.Loop) -> None:
    original = weights(found, "original", loop, 1)
    for size in SIZES:
        ours = weights(found, kind, loop, size)
        assert ours.keys() == original.keys()
        apart = max(float((ours[name] - original[name]).abs().max()) for name in original)
        assert apart <= TOLERANCE, (size, apart)


BITS = [("exact", loop) for loop in (*loops.EVERYWHERE, loops.noisy)]
BITS += [("zero", loop) for loop in (loops.classic, loops.tokens, loops.two_losses, loops.noisy)]


@pytest.mark.parametrize(("kind", "loop"), BITS, ids=lambda value: getattr(value, "__name__", value))
def test_the_same_bits_on_every_number_of_ranks(found: Path, kind: str, loop: loops.Loop) -> None:
    one = weights(found, "exact", loop, 1)
    for size in SIZES:
        other = weights(found, kind, loop, size)
        assert all(torch.equal(one[name], other[name]) for name in one), size


def test_dropout_and_batch_norm_depend_on_virtual_ranks_only(found: Path) -> None:
    """Each virtual rank has its random stream and its statistics, whoever computes it; up to rounding under ddp."""
    one = weights(found, "exact", loops.noisy, 1)
    del one["0.bias"]  # batch norm takes it away again: its gradient is rounding, which Adam scales up
    for size in SIZES:
        other = weights(found, "ddp-dealt", loops.noisy, size)
        assert max(float((one[name] - other[name]).abs().max()) for name in one) <= 1e-7
