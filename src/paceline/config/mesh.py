"""The device mesh: ranks in named dimensions, each with a different kind of parallelism. No torch here.

    data=2,tensor=2 of 4 ranks        tensor 0   tensor 1
                            data 0    rank 0     rank 1       each has half of every layer, both use the same samples
                            data 1    rank 2     rank 3       different samples

The last dimension of `DIMENSIONS` varies fastest. Its ranks communicate most, so they are neighbors on one node.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paceline.errors import UsageError, unknown_name_error

DIMENSIONS: Mapping[str, str] = {
    "pipeline": "the layers, in stages",
    "data": "the batch",
    "shard": "the batch, and the model state of strategy fsdp",
    "context": "each sample, along its sequence",
    "tensor": "each layer",
}
"""What each dimension splits, outermost first."""
BATCH_DIMENSIONS = ("data", "shard")
"""The dimensions along which ranks process different samples. Along all others they process the same samples."""
MODEL_DIMENSIONS = tuple(name for name in DIMENSIONS if name not in BATCH_DIMENSIONS)


@dataclass(frozen=True)
class Mesh:
    """The sizes of the given dimensions; all others are 1."""

    sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Parse e.g. "data=2,tensor=2", the value of `--mesh`."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (field.strip() for field in part.partition("="))
            if not (size.isascii() and size.isdigit() and int(size)):
                raise UsageError(code="mesh-not-name-size", value=text, allowed=[*DIMENSIONS])
            if name not in DIMENSIONS:
                raise unknown_name_error("dimension of the mesh", name, DIMENSIONS)
            if name in sizes:
                raise UsageError(code="mesh-dimension-twice", value=text, name=name)
            sizes[name] = int(size)
        return cls(sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={self.size_of(name)}" for name in DIMENSIONS if name in self.sizes)

    def size_of(self, *names: str) -> int:
        """The product of the sizes of these dimensions."""
        return math.prod(self.sizes.get(name, 1) for name in names)

    @property
    def size(self) -> int:
        return self.size_of(*DIMENSIONS)

    @property
    def replicas(self) -> int:
        """The number of ranks, or groups of ranks, that process different samples."""
        return self.size_of(*BATCH_DIMENSIONS)

    @property
    def has_model_parallelism(self) -> bool:
        """Whether several ranks process the same samples."""
        return self.size_of(*MODEL_DIMENSIONS) > 1

    def peers(self, rank: int, names: Collection[str]) -> tuple[int, ...]:
        """The ranks, in order, that differ from `rank` in these dimensions only, itself included."""
        ranks, stride = [rank], 1
        for name in reversed([*DIMENSIONS]):
            size = self.size_of(name)
            if name in names:
                place = rank // stride % size
                ranks = [peer + (other - place) * stride for other in range(size) for peer in ranks]
            stride *= size
        return tuple(ranks)


def enumerate_meshes(ranks: int) -> list[Mesh]:
    meshes: list[Mesh] = []
    for outer, inner in (*(("data", name) for name in ("tensor", "pipeline", "context", "shard")), ("shard", "tensor")):
        for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
            if size < ranks:
                meshes.append(Mesh({outer: ranks // size, inner: size}))
            elif outer == "data" and inner != "shard":  # shard alone is strategy fsdp without a mesh
                meshes.append(Mesh({inner: size}))
    return meshes


def format_strategy(strategy: str, mesh: str) -> str:
    return f"{strategy} on {mesh}" if mesh else strategy


def resolve_mesh(text: str | None, world_size: int) -> Mesh:
    """Parse the mesh of a world. Without a text, all ranks are along data."""
    mesh = Mesh({"data": world_size}) if text is None else Mesh.parse(text)
    if mesh.size != world_size:
        missing = "data" not in mesh.sizes and world_size % mesh.size == 0
        raise UsageError(
            code="mesh-size-without-data" if missing else "mesh-size", value=text, size=mesh.size,
            processes=world_size, with_data=f"data={world_size // mesh.size},{text}",
        )  # fmt: skip
    return mesh
