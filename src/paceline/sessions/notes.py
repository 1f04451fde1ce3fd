"""What a session says about a loop without refusing it: likely a mistake, though it may be meant."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]


class Notes:
    """Each is said once."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say, self._said = say, set[str]()

    def once(self, words: str) -> None:
        """Say it, unless it was said."""
        if words not in self._said:
            self._said.add(words)
            self._say(f"NOTE: {words}")

    def trains_in_evaluation(self) -> None:
        """A model is evaluated in training mode."""
        self.once("a model is evaluated in training mode, with dropout or a batch's own statistics: call model.eval()")


def trains_otherwise(model: nn.Module) -> bool:
    """Whether a model's training mode computes something else than its eval mode, as far as modules tell."""
    return any(isinstance(module, (_BatchNorm, _DropoutNd)) for module in model.modules())
