"""Every setting of a training, once: the command line (tyro), the TOML file and the run folder's record derive from it.

Torch-free, so a wrong setting is reported before anything starts. Only the modules that pyproject.toml lists (contract
"config") may see a TrainConfig: the commands, those that turn it into a training's parts (train.run, train.prepare,
...), and `definition`. All others take plain arguments, so they work alone in a loop of the user's own.
"""

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import tomli_w
import tyro

from paceline.disk.owners import NotOurs
from paceline.disk.reading import decode_toml
from paceline.errors import UsageError, plural, unknown
from paceline.ladder import DEFAULT, DEFAULT_ALONE, EXACT, LADDER, SLOW, StrategyName, wrong_between_hosts
from paceline.launchers import LauncherName
from paceline.mesh import Mesh, mesh_of
from paceline.rhythm import steps_or_seconds

DEFAULT_BATCH_SIZE = 64
OPTIMIZERS = ("adamw", "sgd")
LONGEST_TIMEOUT = 1e9  # seconds, 30 years


@dataclass(frozen=True)
class DataConfig:
    """Which data, and who sees how much of it in a step."""

    data_dir: Path | None = None
    """folder of IDX files (MNIST, Fashion-MNIST, EMNIST layout; .gz or not); default: the packaged MNIST"""
    num_workers: int = 0
    """loader processes per rank, for datasets that are not held as tensors"""
    data_on_device: Literal["auto", "off"] = "auto"
    """auto: data held as tensors are kept on the GPU, if they take a quarter at most of what training leaves free"""
    batch_size: int | None = None
    """samples per virtual rank and micro-batch (default 64)"""
    accumulation: int | None = None
    """micro-batches per virtual rank and step (default 1)"""
    global_batch: int | None = None
    """samples per step over all ranks; default: virtual ranks x accumulation x batch size"""
    virtual_ranks: int | None = None
    """the ranks this run is defined for; any smaller world size computes the same run (default: world size)"""
    tail: Literal["keep", "drop", "pad"] = "keep"
    """last incomplete batch of an epoch: keep, drop, or pad with repeats"""


@dataclass(frozen=True)
class ModelConfig:
    """Variants of the model."""

    stem: Literal["imagenet", "small"] | None = None
    """ResNet18's first layers: 7x7 stride 2 and max-pool, or 3x3 for small images (default imagenet)"""
    init_from: Path | None = None
    """weights to begin with, taken by name: a safetensors file, a state_dict saved by torch, or the folder of a run"""
    batchnorm: Literal["local", "sync"] = "local"
    """batch norm's statistics: of each virtual rank's micro-batch, or over the micro-batches of all ranks"""
    fsdp_wrap: str | None = None
    """for fsdp: the blocks that are gathered one at a time, by name or class (layers.*,Block); default: the
    repeated layers, in the largest ModuleList or Sequential of layers of one class, at any depth"""


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes a step."""

    optimizer: str = "adamw"
    """adamw, sgd, or any other as module:name or file.py:name, torch.optim:RMSprop say, given lr and weight_decay"""
    lr: float = 1e-3
    """peak learning rate"""
    weight_decay: float = 0.01
    """decoupled for adamw, an L2 penalty for sgd"""
    momentum: float = 0.9
    """momentum (SGD only)"""
    ema: float | None = None
    """decay of the weight average, e.g. 0.999; the average is evaluated, and saved as model-ema.safetensors beside
    the weights"""
    clip_norm: float | None = None
    """clip the global gradient norm to this"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after warm-up: to 0 by a half cosine or a line, or not at all"""
    warmup_steps: int = 0
    """steps over which the learning rate rises from 0"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """scale lr by the global batch: by global_batch / lr_base_batch, or by its square root"""
    lr_base_batch: int = 64
    """the global batch that lr is meant for"""


@dataclass(frozen=True)
class NetworkConfig:
    """Between hosts on a slow network, for strategy bucketed; within a host nothing changes."""

    compress: Literal["bf16", "int8", "powersgd"] | None = None
    """send gradients in fewer bytes; what that leaves out is sent later (error feedback)"""
    powersgd_rank: int | None = None
    """rank of the approximation (default 4)"""
    local_steps: int | None = None
    """each host takes so many steps by itself, then all agree on the mean of their parameters (local SGD)"""
    outer_lr: float | None = None
    """outer learning rate (default 1); DiLoCo: 0.7, with --outer-momentum 0.9"""
    outer_momentum: float | None = None
    """outer Nesterov momentum (default 0)"""


@dataclass(frozen=True)
class ComputeConfig:
    """How a step is computed."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = "fp32"
    """forward/backward precision. tf32: NVIDIA only. bf16, fp16: autocast, fp32 weights (fp16 with loss scaling). auto:
    bf16 if faster"""
    checkpoint_activations: str | None = None
    """modules, by name or class (blocks.*,Block), that backward computes again instead of keeping what is inside"""
    compile: bool = False
    """torch.compile the model: needs a C++ compiler (on GPUs Triton), rounds otherwise"""
    cuda_graphs: bool = False
    """GPUs: record forward and backward once for each shape of a batch, and replay them"""
    allocator: Literal["tuned", "system"] = "tuned"
    """tuned: glibc keeps the memory of one step for the next (CPU ranks, where there is room for it)"""


@dataclass(frozen=True)
class RunConfig:
    """How long, with which seed, and what is recorded."""

    epochs: int = 2
    """passes over the data"""
    steps: int | None = None
    """stop after so many optimizer steps instead"""
    seed: int = 0
    """of everything random: weights, order of samples, dropout, augmentation"""
    run_dir: Path | None = None
    """folder for everything this run writes; must not hold a run (default runs/<task>-<time>)"""
    trust: bool = False
    """believe and use a run folder or --config file that others own or could have written"""
    log_interval: int = 50
    """steps between two progress lines"""
    record_samples: bool = False
    """write into the events which samples each virtual rank saw"""
    eval_every: int | None = None
    """steps between two evaluations, beside those at the ends of epochs"""
    keep_best: str | None = None
    """keep the weights of the best evaluation, as model-best.safetensors: by loss or the name of a metric; of a loss
    or an error less is better, else more, or say min:NAME, max:NAME"""
    patience: int | None = None
    """end after so many evaluations in a row without a better one (by --keep-best, or else by loss)"""
    track: str | None = None
    """also report to tensorboard, wandb or mlflow; several separated by commas"""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept on the way, and where a run goes on that has ended early."""

    checkpoint_every: int | str | None = None
    """steps between two checkpoints, or their time (90s, 10min, 2h), beside those at the ends of epochs and when the
    run is asked to stop"""
    checkpoint_epochs: bool = True
    """a checkpoint at each epoch's end, before anything is evaluated"""
    keep: int = 3
    """how many checkpoints stay, at least 2"""
    resume: Literal["no", "auto"] = "no"
    """auto: go on with the run in --run-dir, at its newest valid checkpoint, on any number of processes"""
    fresh: bool = False
    """with --resume auto: begin again at step 0; checkpoints that are there are moved aside"""
    allow_change: str = ""
    """with --resume auto: settings that may differ from the checkpoint's, separated by commas, e.g. lr,epochs"""
    watch_every: int = 100
    """steps between two comparisons of all replicas, bit by bit"""
    snapshot_every: int = 10
    """steps between two snapshots in memory, which restarted workers go on from (see --max-restarts)"""
    rehearse_preemption: int | None = None
    """after so many steps ask the run to stop, as Slurm would, and resume it: tries that nothing is lost"""


@dataclass(frozen=True)
class GuardConfig:
    """What happens when a rank stands still, and when a number is not finite."""

    stall_after: str = "auto"
    """seconds without any progress on any rank until the guilty one is named and the run ended; auto: learned from the
    run's own pace (10 to 300 s); off: no guard"""
    not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """on NaN/Inf: stop, skip the step, or roll back to the newest snapshot or checkpoint and skip it there"""


@dataclass(frozen=True)
class LaunchConfig:
    """Where it runs."""

    nproc: int | Literal["auto"] | None = None
    """worker processes on each machine; auto: one per GPU, or per core. Default: this process alone"""
    mesh: str | None = None
    """what ranks share, and how many along each: data=2,tensor=2; of data, shard, tensor, pipeline, context. Their
    product is the number of processes (default: all along data, each with the whole model)"""
    sequence_parallel: bool = False
    """of a mesh with tensor: between two layers that are cut each rank has a part of every sequence, not all of it"""
    schedule_pipeline: Literal["1f1b", "gpipe"] | None = None
    """of a mesh with pipeline: backward as soon as possible, or after all forwards of a step (default 1f1b)"""
    stages_at: str | None = None
    """of a mesh with pipeline: the modules, by name, at which the stages behind the first begin (layers.3,layers.6);
    default: where the slowest stage is fastest, measured at the start"""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """auto: GPUs if there are any; cuda: NVIDIA's, and AMD's with a torch for ROCm; xpu: Intel's"""
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] = "auto"
    """of torch.distributed; auto: nccl for GPUs (xccl for xpu), gloo for CPUs"""
    collectives: Literal["auto", "shared", "torch"] = "auto"
    """sums over ranks; auto: in the memory that CPU ranks of a host share, else over torch.distributed"""
    threads_per_rank: int | None = None
    """CPU threads of each rank (default: OMP_NUM_THREADS if set, else cores / ranks)"""
    port: int = 0
    """where the ranks of several nodes meet, and MASTER_PORT of all; 0: a free one"""
    timeout: float = 600.0
    """seconds after which a collective gives up"""
    max_restarts: int = 0
    """how often workers are restarted after one of them was killed or lost; an error of the program is not retried"""
    min_nproc: int | None = None
    """restart with fewer processes, down to this, when the same one fails again without any progress"""
    stop_grace: float = 30.0
    """seconds from being asked to stop to being killed: time to end the step and write a checkpoint"""
    preload: Literal["auto", "off"] = "auto"
    """auto: on CPUs, workers are forked from one process that has imported torch; off: each imports it for itself"""


@dataclass(frozen=True)
class ClusterConfig:
    """On which machines, and how they are reached."""

    on: LauncherName = "local"
    """this machine; hosts reached by ssh; a Slurm cluster; or only print what to type on each node"""
    nodes: str | None = None
    """how many machines (default: 1, or all hosts); MIN:MAX goes on with fewer, down to MIN, when some are lost, and
    takes them back, or others, up to MAX"""
    hosts: str | None = None
    """for ssh and print: name[:port],name,... or a file with one `name[:port] [slots=N]` on each line"""
    ssh: str = "ssh"
    """the ssh command, e.g. "ssh -F my_config"; your configuration, agent and jump hosts are used as they are"""
    sync: bool = False
    """for ssh: first copy the working folder to the hosts with rsync"""
    python: str | None = None
    """Python on the machines (default: this one's path)"""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for the workers; NAME alone passes this shell's value on. May be repeated"""
    module: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """environment module to load on each node. May be repeated"""
    activate: str | None = None
    """script to source on each node, or conda:NAME"""
    join_timeout: float = 300.0
    """seconds the machines wait for each other"""
    dry_run: bool = False
    """show the complete plan (commands, batch script, what each agent is told) and start nothing"""
    detach: bool = False
    """do not wait for the end: `paceline status|logs|cancel` find the run again"""
    agent: Literal["torchrun", "paceline"] = "torchrun"
    """for print: whose commands"""
    partition: str | None = None
    """Slurm: partition"""
    time: int | None = None
    """Slurm: time limit, minutes"""
    gpus_per_node: int | None = None
    """Slurm: GPUs of each node (default with --device cuda: --nproc)"""
    cpus_per_rank: int | None = None
    """Slurm: CPU cores of each worker process (default: 1; with GPUs 8, or as many as the nodes have)"""
    save_before: int = 120
    """Slurm: seconds before the time limit at which a run saves its state and requeues itself; 0: never"""
    sbatch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Slurm: any other option of sbatch, as key=value. May be repeated"""
    follow: bool = False
    """Slurm: wait for the job and show its output"""
    cancel_on_interrupt: bool = False
    """Slurm, with --follow: Ctrl-C cancels the job (default: it only stops following)"""


@dataclass(frozen=True)
class TrainConfig:
    """Train a model on one process or on many."""

    task: tyro.conf.Positional[str | None] = None
    """mnist-cnn, mnist-resnet18, or your own: module:name or file.py:name"""
    strategy: StrategyName | None = None
    """how ranks share the work (default: bucketed for several processes, single for one)"""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for a setting of the task: an argument of your function; TASK --help lists them. May be repeated"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


CliTrainConfig = Annotated[TrainConfig, tyro.conf.OmitArgPrefixes]


def default_strategy(config: TrainConfig, world_size: int) -> StrategyName:
    """The strategy asked for, or the default."""
    several = mesh_of(config.launch.mesh, world_size).replicas > 1 or config.network != NetworkConfig()
    return config.strategy or (DEFAULT if several else DEFAULT_ALONE)


def strategy_options(config: TrainConfig) -> dict[str, Any]:
    """What was asked for of settings that only some strategies have, by name."""
    # not vars(): msgspec leaves what a file does not set to the class
    asked = dataclasses.asdict(config.model) | dataclasses.asdict(config.network)
    names = {name for rung in LADDER.values() for name in rung.options}
    return {name: asked[name] for name in sorted(names) if asked[name] is not None}


def task_options(config: TrainConfig) -> dict[str, Any]:
    """The options that are the task's own business, as far as they were set."""
    options = {"data_dir": config.data.data_dir, "stem": config.model.stem}
    return {name: value for name, value in options.items() if value is not None} | settings_given(config.set)


def settings_given(texts: Iterable[str]) -> dict[str, str]:
    """The values of `--set NAME=VALUE`, by name; the last one counts.

    Raises:
        UsageError: for what is not written so.
    """
    for text in texts:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise UsageError(f"--set {text}: write NAME=VALUE, e.g. --set n_layer=4")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


@dataclass(frozen=True)
class BatchShape:
    """Global batch = virtual ranks x accumulation x batch size (an upper bound, where it was set directly)."""

    virtual_ranks: int
    accumulation: int
    global_batch: int


def batch_shape(data: DataConfig, world_size: int) -> BatchShape:
    """Resolve the batch settings for a world size; of a mesh, for its replicas.

    Raises:
        UsageError: if they contradict each other.
    """
    virtual_ranks, batch_size = data.virtual_ranks or world_size, data.batch_size or DEFAULT_BATCH_SIZE
    if data.global_batch is None:
        accumulation = data.accumulation or 1
        return BatchShape(virtual_ranks, accumulation, virtual_ranks * accumulation * batch_size)
    share = math.ceil(data.global_batch / virtual_ranks)
    accumulation = data.accumulation or math.ceil(share / batch_size)
    if data.batch_size and data.accumulation and share > data.batch_size * accumulation:
        raise UsageError(
            f"a global batch of {data.global_batch} does not fit into {virtual_ranks} virtual ranks x {accumulation} "
            f"micro-batches x {data.batch_size} = {virtual_ranks * accumulation * data.batch_size}. Leave out one of "
            "--global-batch, --accumulation, --batch-size."
        )
    return BatchShape(virtual_ranks, accumulation, data.global_batch)


def with_defaults(config: TrainConfig, world_size: int) -> TrainConfig:
    """`config` with every default that depends on the world size filled in, so that the record repeats the run."""
    shape = dataclasses.asdict(batch_shape(config.data, mesh_of(config.launch.mesh, world_size).replicas))
    data = dataclasses.replace(config.data, **shape, batch_size=None)
    model = config.model
    if data.data_dir is not None:  # absolute: a run may be resumed from another folder
        data = dataclasses.replace(data, data_dir=data.data_dir.absolute())
    if model.init_from is not None:
        model = dataclasses.replace(model, init_from=model.init_from.absolute())
    strategy = default_strategy(config, world_size)
    launch = config.launch
    if strategy in EXACT and launch.threads_per_rank is None:  # the one number that every world size can have
        launch = dataclasses.replace(launch, threads_per_rank=1)
    task = config.task and absolute_task(config.task)
    optimizer = dataclasses.replace(config.optimizer, optimizer=absolute_task(config.optimizer.optimizer))
    return dataclasses.replace(
        config, task=task, strategy=strategy, data=data, model=model, launch=launch, optimizer=optimizer
    )


def absolute_task(task: str) -> str:
    """A task or optimizer with the absolute path of its file, or module's folder: others may load it from elsewhere."""
    path, colon, name = task.rpartition(":")
    if not colon:  # one of paceline's own
        return task
    if path.endswith(".py"):
        return f"{Path(path).resolve()}:{name}"
    top = Path(path.partition(".")[0])
    here = ":" not in path and (top.with_suffix(".py").is_file() or top.is_dir())
    return f"{Path.cwd()}:{task}" if here else task


def repeatable(config: TrainConfig) -> TrainConfig:
    """`config` as it is recorded: without what was meant for this one start."""
    checkpoint = dataclasses.replace(
        config.checkpoint, resume="no", fresh=False, allow_change="", rehearse_preemption=None
    )
    # a run is never repeated into its own folder, nor on machines that were not asked for again
    run = dataclasses.replace(config.run, run_dir=None, trust=False)
    return dataclasses.replace(config, run=run, checkpoint=checkpoint, cluster=ClusterConfig())


def load(path: Path, *, ours: bool) -> TrainConfig:
    """Read a TOML file, e.g. the config.toml of an earlier run; `path` has no links left that may be followed.

    With `ours`, a file that others could have written is refused, as it names code to be run.

    Raises:
        UsageError: if it cannot be read, is no TOML, or a key or value is not valid.
    """
    try:
        table = decode_toml(path, ours=ours)
    except NotOurs as error:
        words = "it names code and programs to run. Copy it, and read it; `paceline train --trust` believes it"
        raise UsageError(f"--config {path} {error.strerror}: {words}") from None
    except FileNotFoundError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise UsageError(f"--config {path} {error.strerror}") from None
    try:
        if isinstance(given := table.get("set"), Mapping):
            table = {**table, "set": [f"{name}={_text(value)}" for name, value in given.items()]}
        _refuse_unknown_keys(table, TrainConfig, "")
        return msgspec.convert(table, TrainConfig, dec_hook=_path)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"--config {path}: {error}") from None


def _path(kind: type, value: Any) -> Any:
    """What msgspec does not convert by itself."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected a path as text, got {type(value).__name__}")


_hints = cache(get_type_hints)


def _refuse_unknown_keys(table: Mapping[str, Any], owner: type, section: str) -> None:
    hints = _hints(owner)
    for key, value in table.items():
        if key not in hints:
            elsewhere = next((f"; it belongs into [{s}]" for s, t in _hints(TrainConfig).items()
                              if dataclasses.is_dataclass(t) and key in _hints(t)), "")  # fmt: skip
            raise UsageError(f"{unknown('key', section + key, [section + h for h in hints])}{elsewhere}")
        if isinstance(value, Mapping):
            if not dataclasses.is_dataclass(hints[key]):
                raise UsageError(f"{section + key} is a value, not a table")
            _refuse_unknown_keys(value, hints[key], f"{section}{key}.")  # pyright: ignore[reportUnknownArgumentType]


def dump(config: TrainConfig) -> str:
    """The TOML text that `load` reads back into an equal config (None values are left out)."""

    def table(settings: Mapping[str, Any]) -> dict[str, Any]:
        known = {name: value for name, value in settings.items() if value is not None}
        return {name: table(value) if isinstance(value, dict) else value for name, value in known.items()}  # pyright: ignore[reportUnknownArgumentType]

    found = table(msgspec.to_builtins(config, enc_hook=str))
    if given := {name: _value(text) for name, text in settings_given(found.pop("set")).items()}:
        found["set"] = given
    return tomli_w.dumps(found)


def _text(value: Any) -> str:
    """A value of TOML as `--set` would have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(text: str) -> Any:
    """The number or truth value that `_text` turns back into `text`, if there is one; else the text."""
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
        if isinstance(value, (bool, int, float)) and _text(value) == text:
            return value
    return text


_POSITIVE = (
    "data.batch_size", "data.accumulation", "data.global_batch", "data.virtual_ranks", "optimizer.lr",
    "optimizer.clip_norm", "optimizer.lr_base_batch", "run.epochs", "run.steps", "run.log_interval", "launch.nproc",
    "launch.threads_per_rank", "launch.timeout", "launch.min_nproc", "launch.stop_grace",
    "checkpoint.checkpoint_every", "checkpoint.watch_every", "checkpoint.snapshot_every",
    "checkpoint.rehearse_preemption", "run.eval_every", "run.patience", "network.powersgd_rank", "network.local_steps",
    "network.outer_lr",
)  # fmt: skip
_NOT_NEGATIVE = (
    "data.num_workers", "optimizer.weight_decay", "optimizer.momentum", "optimizer.warmup_steps", "run.seed",
    "launch.port", "launch.max_restarts", "network.outer_momentum",
)  # fmt: skip


def _check_compute(config: TrainConfig) -> None:
    compute, exact = config.compute, config.strategy in EXACT
    again = compute.checkpoint_activations is not None
    rung = LADDER.get(config.strategy or "")
    moves = rung is not None and (rung.sharded or rung.several_gpus)  # weights are gathered, or copied
    hooked = rung is not None and rung.hooked
    contradictions = {
        f"--compile with --strategy {config.strategy}: which kernels a compiler makes may depend on what it has seen, "
        "and this strategy promises the same bits at every world size. Leave one out": compute.compile and exact,
        f"--cuda-graphs with --strategy {config.strategy}: a recording equals the model up to rounding, and "
        "this strategy promises the same bits at every world size. Leave one out": compute.cuda_graphs and exact,
        "--compile with --checkpoint-activations: a compiler decides by itself what is computed again. Leave one "
        "out": compute.compile and again,
        "--cuda-graphs with --compile: leave one out": compute.cuda_graphs and compute.compile,
        "--cuda-graphs with --checkpoint-activations: random streams cannot be put back in a recording. Leave one "
        "out": compute.cuda_graphs and again,
        f"--cuda-graphs with --strategy {config.strategy}: a recording holds for weights that stay where they are. "
        "Leave one out": compute.cuda_graphs and moves,
        f"--cuda-graphs with --strategy {config.strategy}: its hooks cannot be in a recording. Leave one out, or take "
        f"--strategy {DEFAULT}": compute.cuda_graphs and hooked,
        "--precision tf32 with --device cpu: it is a mode of NVIDIA's GPUs. Leave one out": compute.precision == "tf32"
        and config.launch.device == "cpu",
        "--cuda-graphs with --device cpu: it records the work of a GPU. Leave one out": compute.cuda_graphs
        and config.launch.device == "cpu",
        "--checkpoint-activations needs names or classes of modules, e.g. blocks.*,Attention": again
        and not all(pattern.strip() for pattern in str(compute.checkpoint_activations).split(",")),
    }
    _refuse(contradictions)


def _refuse(contradictions: Mapping[str, bool]) -> None:
    for words, true in contradictions.items():
        if true:
            raise UsageError(words)


def _check_network(config: TrainConfig) -> None:
    asked, name = config.network, config.strategy or DEFAULT
    given = [f"--{setting.replace('_', '-')}" for setting in SLOW if getattr(asked, setting) is not None]
    first, local = given[0] if given else "", asked.local_steps is not None
    owners = ", ".join(owner for owner, rung in LADDER.items() if "compress" in rung.options)
    own = name not in LADDER or "compress" in LADDER[name].options
    instead = f"It is for strategy {owners}. Leave one out"
    _refuse({
        f"{first} with --strategy {name}: it promises the same bits at every world size, and what travels between "
        f"hosts would be changed. {instead}": bool(given) and name in EXACT,
        f"{first} with --strategy {name}: it does not add up by host first. {instead}": bool(given) and not own,
        (wrong := wrong_between_hosts(*(getattr(asked, setting) for setting in SLOW))): bool(wrong),
        "--ema with --local-steps: between two outer steps there are no weights of which all hosts could keep an "
        "average. Leave one out": local and config.optimizer.ema is not None,
    })  # fmt: skip


def _check_mesh(config: TrainConfig) -> None:
    launch, compute = config.launch, config.compute
    given = [f"--{key.replace('_', '-')}" for key in ("schedule_pipeline", "stages_at") if getattr(launch, key)]
    mesh, name = Mesh.parse(launch.mesh or "data=1"), config.strategy or DEFAULT
    if given and mesh.of("pipeline") == 1:
        raise UsageError(f"{given[0]} requires a pipeline mesh, e.g. --mesh pipeline=2")
    if launch.sequence_parallel and mesh.of("tensor") == 1:
        raise UsageError("--sequence-parallel requires a tensor mesh, e.g. --mesh tensor=2")
    if launch.mesh is None:
        return
    rung, asked = LADDER.get(name), [f"--{key.replace('_', '-')}" for key in SLOW if getattr(config.network, key)]
    can = ", ".join(name for name, rung in LADDER.items() if rung.on_mesh)
    several = mesh.shares_model
    stages, names = mesh.of("pipeline"), [*filter(None, (launch.stages_at or "").split(","))]
    _refuse({
        f"--stages-at {launch.stages_at}: {stages} stages begin at {plural(stages - 1, 'module')}, and {len(names)} "
        "are named": stages > 1 and launch.stages_at is not None and len(names) != stages - 1,
        f"--mesh {mesh}: of a stage each rank has whole layers, and the batch is shared along data. Leave out "
        f"{'tensor' if mesh.of('tensor') > 1 else 'shard'}": stages > 1 and mesh.of("tensor", "shard") > 1,
        f"--mesh {mesh} with --strategy {name}: it cuts parameters, of which a stage has whole ones. Use bucketed":
        stages > 1 and name == "fsdp",
        f"--mesh {mesh} with --checkpoint-activations: parts of a model are not computed again. Leave one out": several
        and compute.checkpoint_activations is not None,
        f"--mesh {mesh}: sequences are shared where every rank has whole layers. Leave out "
        f"{'tensor' if mesh.of('tensor') > 1 else 'pipeline'}": mesh.of("context") > 1 and mesh.of(
            "tensor", "pipeline"
        ) > 1,
        f"--mesh {mesh} with --strategy {name}: it cannot train a part of a model. Choose from: {can}": several
        and rung is not None and not rung.on_mesh,
        f"--mesh {mesh} with --strategy {name}: shard is for strategy fsdp. Use data in its place, or --strategy fsdp":
        mesh.of("shard") > 1 and name != "fsdp",
        f"--mesh {mesh} with {(*asked, '')[0]}: what travels between hosts is changed only where each rank has the "
        "whole model. Leave one out": several and bool(asked),
        f"--mesh {mesh} with --compile: parts of a model are not compiled. Leave one out": several and compute.compile,
        f"--mesh {mesh} with --cuda-graphs: parts of a model are not recorded. Leave one out": several
        and compute.cuda_graphs,
        f"--mesh {mesh} with --batchnorm sync: its statistics would be of parts of a model. Leave one out": several
        and config.model.batchnorm == "sync",
        f"--mesh {mesh} with --min-nproc: with fewer processes it has no rank for each place. Leave one out":
        config.launch.min_nproc is not None,
        f"--mesh {mesh} with --nodes {config.cluster.nodes}: with fewer machines it has no rank for each place. Give "
        "one number": ":" in (config.cluster.nodes or ""),
    })  # fmt: skip


def check_values(config: TrainConfig) -> None:
    """Refuse values that have the right type but no meaning, wherever they came from.

    Raises:
        UsageError: naming the setting, its value and what it must be.
    """
    for names, positive in ((_POSITIVE, True), (_NOT_NEGATIVE, False)):
        for name in names:
            section, key = name.split(".")
            value = getattr(getattr(config, section), key)
            if not isinstance(value, (int, float)):  # None: not set; "auto"
                continue
            if not (value > 0 if positive else value >= 0):  # NaN is neither
                what = "greater than 0" if positive else "0 or more"
                raise UsageError(f"--{key.replace('_', '-')} must be {what}, got {value}")
            if math.isinf(value):
                raise UsageError(f"--{key.replace('_', '-')} must be finite, got {value}")
    _check_compute(config)
    _check_network(config)
    _check_mesh(config)
    steps_or_seconds(config.checkpoint.checkpoint_every)
    if config.optimizer.ema is not None and not 0 < config.optimizer.ema < 1:
        raise UsageError(f"--ema must be a decay between 0 and 1 (e.g. 0.999), got {config.optimizer.ema}")
    if config.checkpoint.keep < 2:
        raise UsageError(f"--keep must be at least 2, got {config.checkpoint.keep}: the newest may turn out damaged")
    if config.launch.timeout > LONGEST_TIMEOUT:
        raise UsageError(f"--timeout must be at most {LONGEST_TIMEOUT:.0e} seconds, got {config.launch.timeout}")
    if config.launch.port > 65535:
        raise UsageError(f"--port must be at most 65535, got {config.launch.port}")
    if ":" not in config.optimizer.optimizer and config.optimizer.optimizer not in OPTIMIZERS:
        own = "or any other as module:name, torch.optim:RMSprop say"
        raise UsageError(f"{unknown('optimizer', config.optimizer.optimizer, OPTIMIZERS)}, {own}")
    if config.strategy is not None and config.strategy not in LADDER:
        raise unknown("strategy", config.strategy, LADDER)
