"""Refuses, without torch, settings of a training that contradict each other, this machine or an earlier run."""

from paceline.checkpoint.format import Damaged
from paceline.checkpoint.manager import Checkpoints
from paceline.config import settings as configuration
from paceline.config.choices import EXACT, FOR_SEVERAL, STRATEGY_INFO, lacks_torch
from paceline.config.definition import allowed_changes, check_same, settings
from paceline.config.mesh import mesh_of
from paceline.config.settings import TrainConfig, batch_shape
from paceline.contract.birth import WorkerBirth
from paceline.contract.windows import Windows
from paceline.disk.reading import real_path
from paceline.errors import UsageError
from paceline.observe.folder import CHECKPOINTS, check_is_run, check_not_finished
from paceline.observe.track import wanted
from paceline.tasks import check_optimizer, check_task
from paceline.tasks.settings import defined


def check_training(config: TrainConfig, nproc: int) -> None:
    """Refuse whatever can be known to be wrong before any process is started.

    Raises:
        UsageError: naming the setting, what is true, and what to do.
    """
    mesh = mesh_of(config.launch.mesh, nproc)
    shape = batch_shape(config.data, mesh.replicas)
    check_task(config.task, configuration.task_options(config))
    check_optimizer(config.optimizer.optimizer)
    _check_checkpoints(config, nproc)
    wanted(config.run.track)
    begins = config.checkpoint.resume == "no" or config.checkpoint.fresh
    if begins and (path := config.model.init_from) is not None:
        if not path.exists():
            raise UsageError(code="init-from-not-found", path=path)
        if path.is_dir():
            check_is_run(real_path(path), trust=config.run.trust)
    if config.strategy in EXACT and config.model.batchnorm == "sync":
        raise UsageError(code="exact-with-sync-batchnorm", strategy=config.strategy)
    if config.strategy and STRATEGY_INFO[config.strategy].one_process and mesh.replicas > 1:
        raise UsageError(code="strategy-of-one-process", value=config.strategy, processes=nproc, allowed=[*FOR_SEVERAL])
    if config.strategy and config.cluster.on == "local" and (why := lacks_torch(config.strategy)):
        raise UsageError(code="torch-too-old", why=why)
    if mesh.replicas > shape.virtual_ranks:
        who = f"{nproc} processes" if mesh.replicas == nproc else f"--mesh {mesh}: {mesh.replicas} along data"
        raise UsageError(code="processes-without-work", who=who, virtual_ranks=shape.virtual_ranks)


def check_guard(config: TrainConfig) -> Windows:
    """What --stall-after means; refuses a window without a meaning, or where there is no agent to look.

    Raises:
        UsageError: says what --stall-after takes, or needs.
    """
    windows = Windows.parse(config.guard.stall_after)
    agent = config.launch.nproc is not None or config.cluster.on != "local" or WorkerBirth.here() is not None
    if windows.seconds is not None and not agent:
        raise UsageError(code="stall-after-without-agent", value=config.guard.stall_after)
    return windows


def _check_checkpoints(config: TrainConfig, nproc: int) -> None:
    c, launch = config.checkpoint, config.launch
    allowed = allowed_changes(c.allow_change)
    if c.resume == "auto" and config.run.run_dir is None:
        raise UsageError(code="resume-without-run-dir")
    if c.resume == "no" and (c.fresh or allowed):
        raise UsageError(code="option-needs-resume", setting="--fresh" if c.fresh else "--allow-change")
    if launch.min_nproc is not None and launch.min_nproc > nproc:
        raise UsageError(code="min-nproc-too-large", value=launch.min_nproc, nproc=nproc)
    if (launch.max_restarts or launch.min_nproc) and launch.nproc is None:
        raise UsageError(code="restarts-need-nproc")
    if c.resume == "auto" and not c.fresh:
        _check_resumable(config, nproc)


def _check_resumable(config: TrainConfig, nproc: int) -> None:
    """Compare the settings with those of the newest readable checkpoint; the workers check its bytes."""
    assert config.run.run_dir is not None
    run_dir = real_path(config.run.run_dir)
    check_is_run(run_dir, trust=config.run.trust)
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, trust=config.run.trust)
    if not checkpoints.entries():
        check_not_finished(run_dir)
    for _, path in checkpoints.entries():
        try:
            saved = checkpoints.check(path, files=()).definition
        except Damaged:
            continue
        now = settings(configuration.with_defaults(config, nproc))
        now |= defined(str(config.task), configuration.task_options(config))
        check_same(saved, now, allowed_changes(config.checkpoint.allow_change), str(path))
        return
