"""One backward of a reducer, as a context manager."""

from collections.abc import Generator
from contextlib import contextmanager

from paceline.collectives.reducer import Reducer


@contextmanager
def one_backward(reducer: Reducer, virtual_rank: int, *, is_last: bool, counted: bool = True) -> Generator[None]:
    reducer.begin_backward(virtual_rank, is_last=is_last, counted=counted)
    try:
        yield
    except BaseException:
        reducer.end_backward(failed=True)
        raise
    reducer.end_backward()
