"""How does the ledger say what it has found? Steps and faults in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

MAX_NAMED = 10  # steps in a note


def left_out_note(steps: Sequence[int]) -> Iterator[str]:
    """Which steps have changed nothing, though they count; nothing if there are none."""
    if steps:
        shown = ", ".join(map(str, steps[:MAX_NAMED])) + (", ..." if len(steps) > MAX_NAMED else "")
        words = "step was" if len(steps) == 1 else "steps were"
        yield (
            f"{len(steps)} {words} left out ({shown}): something in it was not finite, so its samples have not changed "
            "the parameters (--not-finite)"
        )


def sentences(faults: Iterable[tuple[int, str]]) -> Iterator[str]:
    """One sentence for all consecutive steps with the same fault."""
    spans: list[tuple[int, int, str]] = []
    newest: dict[str, int] = {}
    for step, text in sorted(faults):
        at = newest.get(text)
        if at is not None and spans[at][1] == step - 1:
            spans[at] = (spans[at][0], step, text)
        else:
            newest[text] = len(spans)
            spans.append((step, step, text))
    return (f"{steps_words(first, last)}: {text}" for first, last, text in spans)


def steps_words(first: int, last: int) -> str:
    """Consecutive steps."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
