"""The head's part in what goes wrong silently in a script: says it at once, writes it down, and has it end the run."""

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.agent.generation import Generation
from paceline.contract.evidence import Evidence, Verdict
from paceline.guard.silent import Silent, calls_of
from paceline.observe.notices import Noted, note
from paceline.observe.terminal import say

PATIENCE_SECONDS = 0.5


class Silence:
    """Of one generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._plan = generation, generation.plan
        self._silent = Silent(self._plan.world_size, generation.own.names, lambda: calls_of(self._ask()))

    def _ask(self) -> Sequence[Evidence]:
        return self._generation.ask(PATIENCE_SECONDS)

    def look(self, *, last: bool = False) -> tuple[Verdict, Sequence[Evidence]] | None:
        """Do what is to be done now; the verdict by which the run is to be ended, and what it was made from."""
        samples = self._generation.samples()
        if not any(one.script for one in samples):
            return None
        found = self._silent.see(samples, last=last)
        stops, step = self._plan.on_drift == "stop", max(one.step for one in samples)
        for notice in self._silent.notices:
            self.tell(notice.words, step, kind=notice.kind)
        self._silent.notices.clear()
        for one in found[:1] if stops else found:
            name = one.kind.name.replace("_", " ")
            words = f"{name}{f' at step {one.step}' if one.step else ''}: {'; '.join(one.sentences)}"
            self.tell(words, one.step or step, kind=name.lower(), aloud=not stops)  # else its page follows
        return (found[0], self._ask()) if stops and found else None

    def tell(self, words: str, step: int = 0, *, kind: str = "", aloud: bool = True) -> None:
        """Say it, and write it down."""
        if aloud:
            say(words)
        if self._plan.attempt_dir:
            note(Path(self._plan.attempt_dir), Noted(round(time.time(), 3), words, step, kind))
