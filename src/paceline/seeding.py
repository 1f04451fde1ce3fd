"""Seeds for every random number: one seed per purpose, derived from the run's seed and the name of the purpose.

A seed depends on the computation and not on the rank that performs it. Examples are the order of an epoch, the dropout
of (step, virtual rank, micro-batch), and the augmentation of (epoch, sample). A run therefore draws the same numbers at
every world size, and after a resume.
"""

import ctypes
import hashlib
import math
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

numpy_random: Any = np.random  # its types lack the bit generator and states from lists


def derive_seed(seed: int, purpose: str, *keys: int) -> int:
    """A seed in [0, 2**63) for `purpose` and `keys`, e.g. derive(0, "order", epoch).

    The seed is a hash and not a sum: seed + epoch would give (seed 0, epoch 1) the order of (seed 1, epoch 0), as in
    torch's DistributedSampler. It is the same number on every machine and in every version of Python.
    """
    text = ":".join([str(seed), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class SeededRngScope:
    """Between `enter` and `leave`, the generators of torch (CPU and `device`), `random` and numpy continue from a seed.

    numpy and `random` are included because a model may use them, for example to drop layers. Such draws must not depend
    on the world size either.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type in ("cpu", "meta") else device
        self._on_device: torch.Tensor | None = None
        self.outside: GeneratorStates | None = None  # the states of the generators before `enter`; None after `leave`

    def enter(self, seed: int) -> None:
        """Continue from `seed`. Without `leave` since the last time, the streams outside are those of that time."""
        module = None if self._device is None else torch.get_device_module(self._device)
        if self.outside is None:
            self.outside = GeneratorStates()
            self._on_device = None if module is None else module.get_rng_state(self._device)
        seed_generators(seed)
        if self._device is not None and module is not None:
            # torch.manual_seed would seed all GPUs of the node, those of other ranks too, and not restore them.
            with torch.accelerator.device_index(self._device.index):
                module.manual_seed(seed)

    def leave(self) -> None:
        if self._on_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device, self._device)
            self._on_device = None
        if self.outside is not None:
            self.outside.restore()
            self.outside = None


@contextmanager
def fork_rng_with_seed(seed: int, device: torch.device) -> Generator[None]:
    stream = SeededRngScope(device)
    try:
        stream.enter(seed)
        yield
    finally:
        stream.leave()


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    _NUMPY.last_seed = seed % 2**32
    numpy_random.seed(_NUMPY.last_seed)


class GeneratorStates:
    """The states of the generators of torch (CPU), `random` and numpy when this object is created."""

    def __init__(self) -> None:
        self._save()

    def _save(self) -> None:
        self._python, self._torch, self._numpy = random.getstate(), torch.get_rng_state(), _NUMPY.state()

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        _NUMPY.restore(self._numpy)

    @contextmanager
    def use_states(self) -> Generator[None]:
        """Draws continue from the saved states. At the end, save the new states and restore the previous ones."""
        before = GeneratorStates()
        self.restore()
        try:
            yield
        finally:
            self._save()
            before.restore()


@contextmanager
def preserve_generator_states() -> Generator[GeneratorStates]:
    streams = GeneratorStates()
    try:
        yield streams
    finally:
        streams.restore()


def generator_states(device: torch.device) -> torch.Tensor:
    """The generator states of torch (CPU, `device`), `random` and numpy: (n,) uint8, for `restore_generator_states`."""
    _, words, gauss = random.getstate()
    numbers = [*map(float, words), math.nan if gauss is None else gauss]
    _, keys, *rest = numpy_random.get_state()
    python = torch.tensor([*numbers, *map(float, keys), *map(float, rest)], dtype=torch.float64)
    parts = [torch.get_rng_state(), python.view(torch.uint8)]
    if device.type not in ("cpu", "meta"):
        parts.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(parts)


def restore_generator_states(state: torch.Tensor, device: torch.device) -> None:
    """Restore `state`, which `generator_states` has returned in this or a different process."""
    torch_bytes, python_bytes = len(torch.get_rng_state()), 8 * (626 + 627)
    on_cpu, python, on_device = state.cpu().split([torch_bytes, python_bytes, len(state) - torch_bytes - python_bytes])
    torch.set_rng_state(on_cpu.clone())
    numbers: list[float] = python.clone().view(torch.float64).tolist()
    words, gauss = numbers[:625], numbers[625]
    random.setstate((3, tuple(map(int, words)), None if math.isnan(gauss) else gauss))
    *keys, at, has_gauss, cached = numbers[626:]
    if not math.isnan(cached):  # an earlier version saved NaN if numpy was not imported
        numpy_random.set_state(("MT19937", [*map(int, keys)], int(at), int(has_gauss), cached))
    if len(on_device):
        torch.get_device_module(device).set_rng_state(on_device.clone(), device)


class _NumpyStream:
    """numpy's global generator, saved and restored in each step.

    numpy's `get_state` and `set_state` take 130 us, because they convert 624 words one by one. If the words in memory
    show that no number was drawn, both calls are skipped, unless numpy has cached a normal number.
    """

    _BYTES = 4 * 625  # 624 words and a position

    def __init__(self) -> None:
        self.last_seed = 0  # by `seed_generators`
        self._saved: tuple[bytes, Any] = b"", None  # the words of a state without a cached number, and the state
        self._generator: Any = None  # `_memory` is its memory
        self._memory: Any = None

    def state(self) -> Any:
        words, state = self._words(), self._saved[1]
        if not words or words != self._saved[0]:
            state = numpy_random.get_state()
            _, key, position, has_cached_number, _ = state
            is_known = words == key.tobytes() + position.to_bytes(4, sys.byteorder)  # else numpy's memory has changed
            self._saved = (words if is_known and not has_cached_number else b""), state
        return state

    def restore(self, state: Any) -> None:
        words = self._words()
        is_saved = words and self._saved[0] and state is self._saved[1]
        if is_saved:
            numpy_random.seed(self.last_seed)
        if is_saved and words == self._words():  # no number was drawn since the seed
            self._memory.raw = self._saved[0]
        else:
            numpy_random.set_state(state)
            self._saved = b"", None  # the same words may have a cached number now

    def _words(self) -> bytes:
        generator = numpy_random.get_bit_generator()
        if generator is not self._generator:
            self._generator = generator
            is_default = type(generator).__name__ == "MT19937"
            array_type = ctypes.c_char * self._BYTES
            self._memory = array_type.from_address(generator.ctypes.state_address) if is_default else None
        return self._memory.raw if self._memory is not None else b""


_NUMPY = _NumpyStream()
