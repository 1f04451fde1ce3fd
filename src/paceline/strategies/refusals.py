"""What a strategy cannot train, refused before the first step."""

from torch import nn, optim
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.collectives.batchnorm import SyncBatchNorm
from paceline.collectives.buckets import sparse_gradient
from paceline.errors import UsageError
from paceline.ladder import FOR_SEVERAL
from paceline.worker.world import World

# Each updates an element by that element's own gradient and history alone.
ELEMENT_WISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.RMSprop,
    optim.Rprop, optim.ASGD,
)  # fmt: skip


def only_alone(name: str, world: World) -> None:
    """Refuse a world of several ranks, for a strategy that lives in one process.

    Raises:
        UsageError: if `world` has more than one rank.
    """
    if world.size > 1:
        raise UsageError(
            f"strategy {name} is single-process, but there are {world.size} processes. "
            f"For several processes use {', '.join(FOR_SEVERAL)}."
        )


def refuse_lazy(model: nn.Module) -> None:
    """Refuse parameters and buffers that get their shape in the first forward (nn.LazyLinear, nn.LazyBatchNorm2d).

    Raises:
        UsageError: naming the first of them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise UsageError(
                f"{name} of {kind} has no shape before the first forward, so ranks cannot be given the same values. "
                "Run one batch through the model before s.prepare (for a task: in the function that makes the model), "
                "and make the optimizer after that"
            )


def refuse_sparse(model: nn.Module, strategy: str) -> None:
    """Refuse embeddings that give sparse gradients, for a strategy that only adds up dense ones.

    Raises:
        UsageError: naming the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise sparse_gradient(f"{name or 'the model'} ({type(module).__name__}) has sparse=True", f"{strategy!r}")


def refuse_max_norm(model: nn.Module) -> None:
    """Refuse embeddings that shrink the rows of their own samples in forward, where each rank sees other samples.

    Raises:
        UsageError: naming the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UsageError(
                f"{name or 'the model'} ({type(module).__name__}) has max_norm={module.max_norm}: its forward changes "
                "the weights of the samples of the rank, so the ranks would have different weights. Remove max_norm, "
                "and call torch.renorm(weight.data, 2, 0, max_norm) after each optimizer.step()"
            )


def refuse_hooks(model: nn.Module, strategy: str) -> None:
    """Refuse hooks on the gradients of parameters, for a strategy that replaces the parameters.

    Raises:
        UsageError: naming the first parameter that has one.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # pyright: ignore
            raise UsageError(
                f"parameter {name} has a hook on its gradient. Strategy {strategy!r} divides each gradient over ranks, "
                "so the hook would never see a whole one. Use strategy 'bucketed' or 'exact', or remove the hook"
            )


def refuse_foreign(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that trains what is not in the model.

    Raises:
        UsageError: naming its shape.
    """
    own = set(model.parameters())
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in own:
            raise UsageError(
                f"the optimizer trains a parameter of shape {tuple(parameter.shape)} that is not in the model: it "
                "would be neither synchronised nor saved. Make it a parameter of the model."
            )


def refuse_synchronised(model: nn.Module, name: str) -> None:
    """Refuse synchronised batch norm, for a strategy whose result must not depend on the world size.

    Raises:
        UsageError: if `model` has any.
    """
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise UsageError(
            f"strategy {name!r} gives the same bits at every world size; synchronised batch norm adds its statistics "
            "up over ranks and cannot. Use --batchnorm local: statistics of each virtual rank."
        )


def refuse_whole(strategy: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that may look at more than one element at a time, for a strategy that cuts parameters.

    Raises:
        UsageError: naming those that do not.
    """
    if type(optimizer) not in ELEMENT_WISE:
        known = ", ".join(kind.__name__ for kind in ELEMENT_WISE)
        raise UsageError(
            f"strategy {strategy!r} cuts parameters into pieces, and {type(optimizer).__name__} may look at a whole "
            f"one. Known to update each element by itself: {known}. Use one of these, or another strategy."
        )
