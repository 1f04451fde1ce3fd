"""Parameters of which a rank holds a part, along one dimension, as a state under the names of the whole ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.checkpoint.state import Held, Source


@dataclass(frozen=True)
class CutParameter:
    """Which part of a parameter this rank holds: of dimension `dim` these runs [start, stop), one after the other.

    Of a weight in which query, key and value lie one after another a rank holds three runs, a share of each.
    """

    whole: torch.Size
    dim: int
    runs: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> torch.Size:
        """Of the part."""
        length = sum(stop - start for start, stop in self.runs)
        return torch.Size([length if dim == self.dim else size for dim, size in enumerate(self.whole)])

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole tensor, in memory of its own."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.runs], self.dim)

    def held(self, one: Held) -> list[Held]:
        """What is held of the part, all of it or a run of whole rows, as pieces of the whole tensor, one for each run.

        Raises:
            ValueError: of a part that is cut elsewhere a run is held that begins or ends within a row.
        """
        shape = self.shape
        row = shape.numel() // shape[0]
        first, odd = divmod(one.start, row)
        rows, rest = divmod(one.tensor.numel(), row)
        if odd or rest:
            raise ValueError(f"{one.name}: from element {one.start} on {one.tensor.numel()} are no rows of {row}")
        pieces = self._pieces(one, one.tensor.reshape(rows, *shape[1:]), first)
        return [piece for piece in pieces if piece.tensor.numel()]

    def _pieces(self, one: Held, rows: Tensor, first: int) -> Iterator[Held]:
        inner, outer = self.whole[self.dim + 1 :].numel(), self.whole[1 : self.dim].numel()
        apart = self.whole[self.dim] * inner
        at = 0
        for start, stop in self.runs:
            length, last = stop - start, at + stop - start
            if self.dim == 0:  # of these rows, those that are here
                low, high = max(at, first), min(last, first + len(rows))
                part = rows[low - first : max(low, high) - first].flatten()
                yield replace(one, tensor=part, whole=self.whole, start=(start + low - at) * inner)
            else:
                part = rows.narrow(self.dim, at, length).flatten(self.dim).flatten(0, self.dim - 1)  # a view
                begin = first * outer * apart + start * inner
                yield replace(one, tensor=part, whole=self.whole, start=begin, count=len(part), apart=apart)
            at = last


def parameter_of(name: str, known: Mapping[str, object]) -> str | None:
    """Whose a tensor is, by its name: a parameter, its gradient, or what an optimizer or an average keeps for it."""
    if name in known:
        return name
    kind, _, rest = name.partition("/")
    if kind in ("model", "ema"):
        return rest if rest in known else None
    owner = rest.rpartition("/")[0]
    return owner if kind == "optimizer" and owner in known else None


class PartOf:
    """A state of whole parameters, as one of this rank's parts of them: a `Source`."""

    def __init__(self, source: Source, cuts: Mapping[str, CutParameter]) -> None:
        self._source, self._cuts = source, cuts

    def names(self, prefix: str) -> Iterable[str]:
        """See Source."""
        return self._source.names(prefix)

    def shape(self, name: str) -> torch.Size:
        """See Source."""
        cut = self._cut(name)
        return self._source.shape(name) if cut is None else cut.shape

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        """See Source."""
        cut = self._cut(name) if name in self._source.names(name) else None
        if cut is None:
            return self._source.tensor(name, start, stop)
        whole = self._source.tensor(name)
        assert whole is not None
        part = cut.part(whole)
        return part if start == 0 and stop is None else part.reshape(-1)[start:stop].clone()

    def _cut(self, name: str) -> CutParameter | None:
        owner = parameter_of(name, self._cuts)
        cut = None if owner is None else self._cuts[owner]
        return cut if cut is not None and self._source.shape(name) == cut.whole else None  # a counter is not cut


def with_cuts(held: Sequence[Held], cuts: Mapping[str, CutParameter]) -> Iterator[tuple[Held, CutParameter | None]]:
    """Each with the cut of the parameter that it belongs to, if its elements are those of the part."""
    for one in held:
        owner = parameter_of(one.name, cuts)
        cut = None if owner is None else cuts[owner]
        yield one, cut if cut is not None and one.shape == cut.shape else None
