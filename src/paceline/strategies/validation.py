"""Checks before the first step that a strategy supports the model and the optimizer."""

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.collectives.batchnorm import SyncBatchNorm
from paceline.collectives.buckets import sparse_gradient_error
from paceline.config.strategies import MULTI_PROCESS_STRATEGIES, STRATEGY_INFO
from paceline.errors import UsageError
from paceline.rank.world import World

SUPPORT_SPARSE_GRADIENTS = ("single", "dp", "ddp")


def check_model(model: nn.Module, strategy: str, world: World) -> None:
    """Check that `strategy` supports the number of processes, and each module of the model."""
    info = STRATEGY_INFO[strategy]
    if info.single_process and world.size > 1:
        raise UsageError(
            code="strategy-of-one-process", value=strategy, processes=world.size, allowed=[*MULTI_PROCESS_STRATEGIES]
        )
    if info.exact and any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise UsageError(code="exact-with-sync-batchnorm", strategy=strategy)  # it depends on the world size
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):  # its shape is known after the first forward
            class_name = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise UsageError(code="lazy-parameter", name=name, kind=class_name)
    for name, module in model.named_modules() if strategy not in SUPPORT_SPARSE_GRADIENTS else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            what = f"{name or 'the model'} ({type(module).__name__}) has sparse=True"
            raise sparse_gradient_error(what, f"{strategy!r}")


def check_embedding_max_norm(model: nn.Module) -> None:
    """Check for embeddings with max_norm, whose forward changes the rows that this rank's samples use."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            described = f"{name or 'the model'} ({type(module).__name__})"
            raise UsageError(code="embedding-max-norm", module=described, max_norm=module.max_norm)


def check_no_parameter_hooks(model: nn.Module, strategy: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # pyright: ignore
            raise UsageError(code="hooked-parameter", name=name, strategy=strategy)


def check_optimizer_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    parameters = set(model.parameters())
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in parameters:
            raise UsageError(code="foreign-parameter", shape=tuple(parameter.shape))
