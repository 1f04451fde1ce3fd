"""All settings of a training. The command line, TOML files and the record in the run folder derive from them.

No torch here: a wrong setting is reported before anything starts. Only the modules that pyproject.toml lists (contract
"config") may use a TrainConfig: the commands, those that turn it into the parts of a training (train.run,
train.prepare, ...), and `definition`. All others take plain arguments, so they also work in a custom loop.
"""

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec
import tomli_w

from paceline.config.choices import LauncherName, check_not_renamed, current_setting_name, parse_checkpoint_interval
from paceline.config.mesh import Mesh, resolve_mesh
from paceline.config.strategies import (
    DEFAULT_STRATEGY,
    EXACT_STRATEGIES,
    SINGLE_PROCESS_STRATEGY,
    SLOW_NETWORK_SETTINGS,
    STRATEGY_INFO,
    StrategyName,
    find_network_settings_error,
)
from paceline.errors import UsageError, unknown_name_error
from paceline.runs.owners import UntrustedFileError
from paceline.runs.reading import read_toml

DEFAULT_BATCH_SIZE = 64
OPTIMIZERS = ("adamw", "sgd")
LONGEST_TIMEOUT = 1e9  # seconds, 30 years


@dataclass(frozen=True)
class DataConfig:
    """Data and batch sizes."""

    data_dir: Path | None = None
    """folder of IDX files (MNIST, Fashion-MNIST or EMNIST layout; .gz or not). Default: the packaged MNIST"""
    num_workers: int = 0
    """loader processes per rank, for datasets that are not held as tensors"""
    data_on_device: Literal["auto", "off"] = "auto"
    """auto: keep a dataset of tensors on the GPU if it needs at most a quarter of the free memory"""
    batch_size: int | None = None
    """samples per micro-batch of each virtual rank, which is a process unless virtual_ranks is set (default: 64)"""
    accumulation: int | None = None
    """micro-batches per virtual rank and step (default: 1)"""
    global_batch: int | None = None
    """samples per step over all ranks. Default: virtual ranks x accumulation x batch size"""
    virtual_ranks: int | None = None
    """number of ranks that defines the run; any smaller number of processes computes the same run. Default: the number
    of processes"""
    micro_batch: Literal["auto"] | None = None
    """auto: split the global batch into the largest micro-batches that fit into the memory of every rank, found by
    trials before the first step"""
    last_batch: Literal["keep", "drop", "pad"] = "keep"
    """last incomplete batch of an epoch: keep, drop, or pad with repeats"""


@dataclass(frozen=True)
class ModelConfig:
    """Variants of the model."""

    stem: Literal["imagenet", "small"] | None = None
    """first layers of ResNet18: 7x7 stride 2 and max-pool, or 3x3 for small images (default: imagenet)"""
    init_from: Path | None = None
    """initial weights, matched by name: a safetensors file, a state_dict saved by torch, or a run folder"""
    batchnorm: Literal["local", "sync"] = "local"
    """statistics of batch norm: of each virtual rank's micro-batch, or over the micro-batches of all ranks"""
    fsdp_wrap: str | None = None
    """fsdp: blocks to gather one at a time, by name or class, e.g. layers.*,Block. Default: the repeated layers in the
    largest ModuleList or Sequential of layers of one class, at any depth"""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    optimizer: str = "adamw"
    """adamw, sgd, or another class as module:name or file.py:name, e.g. torch.optim:RMSprop. It gets lr and
    weight_decay"""
    lr: float = 1e-3
    """peak learning rate"""
    weight_decay: float = 0.01
    """decoupled for adamw, L2 penalty for sgd"""
    momentum: float = 0.9
    """momentum (SGD only)"""
    ema: float | None = None
    """decay of the weight average, e.g. 0.999. The average is evaluated and saved as model-ema.safetensors"""
    clip_norm: float | None = None
    """maximum norm of the gradients; larger gradients are scaled down"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """decay of the learning rate after warm-up: half cosine to 0, line to 0, or none"""
    warmup_steps: int = 0
    """steps of linear warm-up from 0"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """scale lr by global_batch / lr_base_batch, or by its square root"""
    lr_base_batch: int = 64
    """global batch for which lr was chosen"""


@dataclass(frozen=True)
class SlowNetworkConfig:
    """Slow network between nodes, for strategy bucketed."""

    compress: Literal["bf16", "int8", "powersgd"] | None = None
    """send gradients in fewer bytes; the rest is sent later (error feedback)"""
    powersgd_rank: int | None = None
    """rank of the approximation (default: 4)"""
    local_steps: int | None = None
    """steps of each node between two averages of the parameters (local SGD)"""
    outer_lr: float | None = None
    """outer learning rate (default: 1). DiLoCo: 0.7, with --outer-momentum 0.9"""
    outer_momentum: float | None = None
    """outer Nesterov momentum (default: 0)"""


@dataclass(frozen=True)
class ComputeConfig:
    """Precision, compilation and memory."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = "fp32"
    """forward/backward precision. tf32: NVIDIA only. bf16, fp16: autocast, fp32 weights (fp16 with loss scaling). auto:
    bf16 if faster"""
    checkpoint_activations: str | None = None
    """modules, by name or class (blocks.*,Block), that backward recomputes to save memory"""
    compile: bool = False
    """compile the model with torch.compile; needs a C++ compiler, on GPUs Triton. The result rounds differently"""
    cuda_graphs: bool = False
    """GPUs: record forward and backward once for each shape of a batch, then replay them"""
    allocator: Literal["tuned", "system"] = "tuned"
    """tuned: keep freed memory in the process for the next step (CPU ranks with enough memory)"""
    peak_tflops: float | None = None
    """peak of one device in TFLOP/s, for MFU. 0: no MFU. Default: measured once on each node, after a run"""


@dataclass(frozen=True)
class RunConfig:
    """Length, seed and records of a run."""

    epochs: int = 2
    """passes over the data"""
    steps: int | None = None
    """number of optimizer steps, instead of --epochs"""
    seed: int = 0
    """seed of weights, sample order, dropout and augmentation"""
    run_dir: Path | None = None
    """folder for all files of this run; must not contain a run (default: runs/<task>-<time>)"""
    trust: bool = False
    """use a run folder or --config file that another user owns or could have written"""
    log_interval: int = 50
    """steps between progress lines"""
    record_samples: bool = False
    """record in the events which samples each virtual rank used"""
    eval_every: int | None = None
    """steps between evaluations, in addition to the end of each epoch"""
    keep_best: str | None = None
    """save the weights of the best evaluation as model-best.safetensors, by loss or by a metric. Lower is better for a
    loss or error, otherwise higher; or min:NAME, max:NAME"""
    patience: int | None = None
    """end after N evaluations in a row without improvement (of --keep-best, or of the loss)"""
    report_to: str | None = None
    """also report to tensorboard, wandb or mlflow, separated by commas"""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints and resume."""

    checkpoint_every: int | str | None = None
    """steps or time (90s, 10min, 2h) between checkpoints, in addition to the end of each epoch and a requested stop"""
    checkpoint_epochs: bool = True
    """save a checkpoint at the end of each epoch, before the evaluation"""
    keep_checkpoints: int = 3
    """number of checkpoints to keep, at least 2"""
    resume: Literal["no", "auto"] = "no"
    """auto: resume the run in --run-dir from its newest valid checkpoint, on any number of processes"""
    restart: bool = False
    """with --resume auto: start again at step 0 and move existing checkpoints aside"""
    allow_change: str = ""
    """with --resume auto: settings that may differ from the checkpoint, e.g. lr,epochs"""
    check_replicas_every: int = 100
    """steps between bit-by-bit comparisons of all replicas"""
    snapshot_every: int = 10
    """steps between snapshots in memory, from which restarted workers resume (see --max-restarts)"""
    rehearse_preemption: int | None = None
    """request a stop after N steps, as Slurm does, then resume: a test that nothing is lost"""


@dataclass(frozen=True)
class GuardConfig:
    """Hangs and non-finite numbers."""

    hang_timeout: str = "auto"
    """seconds without progress on any rank after which the run ends with a report of the rank at fault. auto: adapts to
    the pace of the run (10 to 300 s); off: no guard"""
    not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """on NaN/Inf: stop, skip the step, or roll back to the newest snapshot or checkpoint and skip it there"""
    audit_every: int | None = None
    """exact, zero: steps between two audits. A second rank repeats one micro-batch, and the bits must agree"""
    on_audit: Literal["stop", "exclude"] = "stop"
    """on wrong numbers: save the state before the step and stop, or restart without that rank"""


@dataclass(frozen=True)
class LaunchConfig:
    """Processes and devices."""

    nproc: int | Literal["auto"] | None = None
    """worker processes on each node. auto: one per GPU, or per core. Default: this process alone"""
    mesh: str | None = None
    """dimensions of the device mesh, e.g. data=2,tensor=2. Names: data, shard, tensor, pipeline, context. The product
    is the number of processes. Default: all along data"""
    sequence_parallel: bool = False
    """with tensor in --mesh: between two sharded layers, each rank holds a part of every sequence"""
    schedule_pipeline: Literal["1f1b", "gpipe"] | None = None
    """with pipeline in --mesh: each backward as early as possible, or after all forwards of a step (default: 1f1b)"""
    stages_at: str | None = None
    """with pipeline in --mesh: modules at which the second and later stages begin, e.g. layers.3,layers.6. Default: the
    fastest split, measured at the start"""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """auto: GPUs if present. cuda: NVIDIA, or AMD with a ROCm build of torch. xpu: Intel"""
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] = "auto"
    """backend of torch.distributed. auto: nccl for GPUs (xccl for xpu), gloo for CPUs"""
    collectives: Literal["auto", "shared", "torch"] = "auto"
    """reductions over ranks. auto: in shared memory for CPU ranks of one node, otherwise torch.distributed"""
    threads_per_rank: int | None = None
    """CPU threads of each rank (default: OMP_NUM_THREADS if set, else cores / ranks)"""
    port: int = 0
    """port on which the ranks of several nodes meet, and MASTER_PORT of all. 0: a free port"""
    timeout: float = 600.0
    """seconds after which a collective fails"""
    max_restarts: int = 0
    """restarts after a worker was killed or lost; an error of the program is not retried"""
    min_nproc: int | None = None
    """restart with fewer processes, down to N, if the same process fails again without progress"""
    grace_period: float = 30.0
    """seconds from a requested stop to a kill, for the end of the step and a checkpoint"""
    preload: Literal["auto", "off"] = "auto"
    """auto: on CPUs, fork workers from one process that has imported torch. off: each worker imports torch"""


@dataclass(frozen=True)
class ClusterConfig:
    """Several nodes: ssh, Slurm, or commands to copy."""

    on: LauncherName = "local"
    """local: this machine. ssh: hosts over ssh. slurm: a Slurm cluster. print: print the command of each node"""
    nodes: str | None = None
    """number of nodes (default: 1, or all of --hosts). MIN:MAX: continue without lost nodes, down to MIN; take nodes
    in, up to MAX"""
    hosts: str | None = None
    """ssh, print: name[:port],name,... or a file with one `name[:port] [slots=N]` per line"""
    ssh: str = "ssh"
    """ssh command, e.g. "ssh -F my_config"; your configuration, agent and jump hosts apply"""
    sync: bool = False
    """ssh: first copy the working folder to the nodes with rsync"""
    python: str | None = None
    """Python on the nodes (default: the path of this Python)"""
    env: tuple[str, ...] = ()
    """NAME=VALUE, a variable for the workers; NAME alone passes the value of this shell. Repeatable"""
    module: tuple[str, ...] = ()
    """environment module to load on each node. Repeatable"""
    activate: str | None = None
    """script to source on each node, or a conda environment"""
    join_timeout: float = 300.0
    """seconds that the nodes wait for each other"""
    on_event: str | None = None
    """shell command that node 0 runs at a diagnosis, a restart, a requeue and the end of the run. It reads the event as
    JSON from its standard input, and has 10 s"""
    balance: str | None = None
    """relative speeds of the ranks or nodes, e.g. 3:1: a faster one computes more virtual ranks. auto: measure the
    speed of each rank, and restart from a checkpoint if a different assignment is faster"""
    dry_run: bool = False
    """print the plan (commands, batch script, input of each agent) and start nothing"""
    detach: bool = False
    """return immediately; use `paceline status`, `logs` and `cancel` for the run"""
    agent: Literal["torchrun", "paceline"] = "torchrun"
    """print: print the commands of torchrun or of paceline"""
    partition: str | None = None
    """Slurm: partition"""
    time: int | None = None
    """Slurm: time limit, minutes"""
    gpus_per_node: int | None = None
    """Slurm: GPUs of each node (default with --device cuda: --nproc)"""
    cpus_per_rank: int | None = None
    """Slurm: CPU cores of each worker process (default: 1; with GPUs 8, or the cores of the node)"""
    save_before: int = 120
    """Slurm: seconds before the time limit at which the run saves its state and requeues itself; 0: never"""
    sbatch: tuple[str, ...] = ()
    """Slurm: any other option of sbatch, as KEY=VALUE. Repeatable"""
    follow: bool = False
    """Slurm: wait for the job and show its output"""
    cancel_on_interrupt: bool = False
    """Slurm, with --follow: cancel the job on Ctrl-C (default: stop following)"""


@dataclass(frozen=True)
class TrainConfig:
    """Train a model on one process or on many."""

    task: str | None = None
    """mnist-cnn, mnist-resnet18, or a custom task: module:name or file.py:name"""
    strategy: StrategyName | None = None
    """how the ranks share the work (default: bucketed for several processes, single for one)"""
    task_arg: tuple[str, ...] = ()
    """NAME=VALUE, an argument of the task function; `paceline train TASK --help` lists them. Repeatable"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    network: SlowNetworkConfig = field(default_factory=SlowNetworkConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def resolve_strategy(config: TrainConfig, world_size: int) -> StrategyName:
    several = resolve_mesh(config.launch.mesh, world_size).replicas > 1 or config.network != SlowNetworkConfig()
    return config.strategy or (DEFAULT_STRATEGY if several else SINGLE_PROCESS_STRATEGY)


def flat_setting_values(config: TrainConfig) -> dict[str, Any]:
    """The values of all settings, without their sections."""
    values = dataclasses.asdict(config)  # not vars(): msgspec sets no attribute for a missing key
    sections = [name for name, value in values.items() if isinstance(value, dict)]
    return values | {name: value for section in sections for name, value in values.pop(section).items()}


def strategy_options(config: TrainConfig) -> dict[str, Any]:
    """The values, by name, of settings that are set and that only some strategies support."""
    values = flat_setting_values(config)
    names = {name for info in STRATEGY_INFO.values() for name in info.factory_kwargs}
    return {name: values[name] for name in sorted(names) if values[name] is not None}


def task_options(config: TrainConfig) -> dict[str, Any]:
    options = {"data_dir": config.data.data_dir, "stem": config.model.stem}
    return {name: value for name, value in options.items() if value is not None} | parse_task_args(config.task_arg)


def parse_task_args(texts: Iterable[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in texts:
        name, equals, values[name] = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(code="task-arg-not-name-value", value=text)
    return values


@dataclass(frozen=True)
class BatchSizes:
    """Global batch = virtual ranks x accumulation x batch size, or at most that if it was set directly."""

    virtual_ranks: int
    accumulation: int
    global_batch: int


def resolve_batch_sizes(data: DataConfig, world_size: int) -> BatchSizes:
    virtual_ranks, batch_size = data.virtual_ranks or world_size, data.batch_size or DEFAULT_BATCH_SIZE
    if data.global_batch is None:
        accumulation = data.accumulation or 1
        return BatchSizes(virtual_ranks, accumulation, virtual_ranks * accumulation * batch_size)
    portion = math.ceil(data.global_batch / virtual_ranks)
    accumulation = data.accumulation or (1 if data.micro_batch else math.ceil(portion / batch_size))
    if data.batch_size and data.accumulation and portion > data.batch_size * accumulation:
        raise UsageError(
            code="batch-does-not-fit", global_batch=data.global_batch, virtual_ranks=virtual_ranks,
            accumulation=accumulation, batch_size=data.batch_size, most=virtual_ranks * accumulation * data.batch_size,
        )  # fmt: skip
    return BatchSizes(virtual_ranks, accumulation, data.global_batch)


def resolve_defaults(config: TrainConfig, world_size: int) -> TrainConfig:
    """Resolve the defaults that depend on the world size, so that the record can reproduce the run."""
    shape = dataclasses.asdict(resolve_batch_sizes(config.data, resolve_mesh(config.launch.mesh, world_size).replicas))
    # absolute: a run may be resumed from a different folder
    data_dir, init_from = (path and path.absolute() for path in (config.data.data_dir, config.model.init_from))
    if config.data.micro_batch is not None:  # not found yet
        shape["accumulation"] = None
    data = dataclasses.replace(config.data, **shape, batch_size=None, data_dir=data_dir)
    model = dataclasses.replace(config.model, init_from=init_from)
    strategy, launch = resolve_strategy(config, world_size), config.launch
    # the only number that is possible at every world size
    if strategy in EXACT_STRATEGIES and launch.threads_per_rank is None:
        launch = dataclasses.replace(launch, threads_per_rank=1)
    task = config.task and make_task_path_absolute(config.task)
    optimizer = dataclasses.replace(config.optimizer, optimizer=make_task_path_absolute(config.optimizer.optimizer))
    config = dataclasses.replace(config, task=task, strategy=strategy, data=data)
    return dataclasses.replace(config, model=model, launch=launch, optimizer=optimizer)


def make_task_path_absolute(task: str) -> str:
    """Add the absolute path of the file or folder to a task or optimizer, because workers can run in other folders."""
    path, colon, name = task.rpartition(":")
    if not colon:  # built in
        return task
    if path.endswith(".py"):
        return f"{Path(path).resolve()}:{name}"
    top = Path(path.partition(".")[0])
    is_here = ":" not in path and (top.with_suffix(".py").is_file() or top.is_dir())
    return f"{Path.cwd()}:{task}" if is_here else task


def drop_start_only_settings(config: TrainConfig) -> TrainConfig:
    """Return the config to record: without the settings that apply to this start only."""
    from_start = {"resume": "no", "restart": False, "allow_change": "", "rehearse_preemption": None}
    checkpoint = dataclasses.replace(config.checkpoint, **from_start)
    # a repeated run needs a new folder, and uses other nodes only if they are given again
    run = dataclasses.replace(config.run, run_dir=None, trust=False)
    return dataclasses.replace(config, run=run, checkpoint=checkpoint, cluster=ClusterConfig())


def load(path: Path, *, must_own: bool) -> TrainConfig:
    """Read a TOML file, e.g. the config.toml of an earlier run. `path` has no links: see `runs.reading.real_path`.

    With `must_own` it is an error if another user could have written the file, as it names code to be run.
    """
    try:
        table = read_toml(path, ours=must_own)
    except UntrustedFileError as error:
        raise UsageError(code="config-of-others", path=path, strerror=error.strerror) from None
    except FileNotFoundError as error:
        raise UsageError(code="config-unreadable", path=path, strerror=error.strerror) from None
    except OSError as error:
        raise UsageError(code="config-refused", path=path, strerror=error.strerror) from None
    try:
        table = _with_current_names(table)
        if isinstance(task_args := table.get("task_arg"), Mapping):
            table |= {"task_arg": [f"{name}={_text(value)}" for name, value in task_args.items()]}
        _refuse_unknown_keys(table, TrainConfig, "")
        return msgspec.convert(table, TrainConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise UsageError(code="config-invalid", path=path, reason=str(error)) from None
    except UsageError as error:
        raise UsageError.from_error(error, before=f"--config {path}: ") from None


def _with_current_names(table: Mapping[str, Any]) -> dict[str, Any]:
    for name in table:
        check_not_renamed("a setting has both names", name, table)
    return {
        name: _with_current_names(value) if isinstance(value, Mapping) and name != "task_arg" else value
        for name, value in zip(map(current_setting_name, table), table.values(), strict=True)
    }


def _path(target_type: type, value: Any) -> Any:
    if target_type is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected a path as text, got {type(value).__name__}")


_hints = cache(get_type_hints)


def _section(key: str) -> str:
    """The TOML table of a key; empty if the key is at the top level or unknown."""
    return next((s for s, t in _hints(TrainConfig).items() if dataclasses.is_dataclass(t) and key in _hints(t)), "")  # pyright: ignore[reportArgumentType]


def format_toml_setting(name: str, value: Any = None) -> str:
    """A setting in the syntax of a TOML file: section.name, or section.name = value."""
    path = f"{section}.{name}" if (section := _section(name)) else name
    return path if value is None else f"{path} = {_value(str(value))!r}"


def _refuse_unknown_keys(table: Mapping[str, Any], owner: type, section: str) -> None:
    hints = _hints(owner)
    for key, value in table.items():
        if key not in hints:
            advice = f". It belongs in [{right}]" if (right := _section(key)) else ""
            raise unknown_name_error("key", section + key, [section + h for h in hints], more=advice)
        if isinstance(value, Mapping):
            if not dataclasses.is_dataclass(hints[key]):
                raise UsageError(code="config-not-a-table", key=section + key)
            _refuse_unknown_keys(value, hints[key], f"{section}{key}.")  # pyright: ignore[reportUnknownArgumentType]


def settings_to_toml(settings: Mapping[str, Any]) -> str:
    """The TOML text of the settings that are not None. `load` reads it."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        if value is not None:
            (tables.setdefault(section, {}) if (section := _section(name)) else tables)[name] = value
    return tomli_w.dumps(tables)


def config_to_toml(config: TrainConfig) -> str:
    """The TOML text from which `load` restores an equal config. None values are omitted."""
    settings = msgspec.to_builtins(flat_setting_values(config), enc_hook=str)
    task_args = {name: _value(text) for name, text in parse_task_args(settings.pop("task_arg")).items()}
    return settings_to_toml(settings | {"task_arg": task_args or None})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(text: str) -> Any:
    """Convert text to the number or boolean that `_text` formats in the same way, or keep the text."""
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
        if isinstance(value, (bool, int, float)) and _text(value) == text:
            return value
    return text


_POSITIVE = (
    "data.batch_size", "data.accumulation", "data.global_batch", "data.virtual_ranks", "optimizer.lr",
    "optimizer.clip_norm", "optimizer.lr_base_batch", "run.epochs", "run.steps", "run.log_interval", "launch.nproc",
    "launch.threads_per_rank", "launch.timeout", "launch.min_nproc", "launch.grace_period",
    "checkpoint.checkpoint_every", "checkpoint.check_replicas_every", "checkpoint.snapshot_every", "guard.audit_every",
    "checkpoint.rehearse_preemption", "run.eval_every", "run.patience", "network.powersgd_rank", "network.local_steps",
    "network.outer_lr",
)  # fmt: skip
_NOT_NEGATIVE = (
    "data.num_workers", "optimizer.weight_decay", "optimizer.momentum", "optimizer.warmup_steps", "run.seed",
    "launch.port", "launch.max_restarts", "network.outer_momentum", "compute.peak_tflops",
)  # fmt: skip


def _check_compute(config: TrainConfig) -> None:
    compute, data, exact = config.compute, config.data, config.strategy in EXACT_STRATEGIES
    recomputes = compute.checkpoint_activations is not None
    info = STRATEGY_INFO.get(config.strategy or DEFAULT_STRATEGY, STRATEGY_INFO[DEFAULT_STRATEGY])
    moves_weights = info.sharded or info.splits_over_gpus  # it gathers or copies them
    _raise_first({
        "exact-with-compile": compute.compile and exact,
        "exact-with-cuda-graphs": compute.cuda_graphs and exact,
        "compile-with-recomputation": compute.compile and recomputes,
        "cuda-graphs-with-compile": compute.cuda_graphs and compute.compile,
        "cuda-graphs-with-recomputation": compute.cuda_graphs and recomputes,
        "cuda-graphs-with-moved-weights": compute.cuda_graphs and moves_weights,
        "cuda-graphs-with-hooks": compute.cuda_graphs and info.uses_grad_hooks,
        "tf32-on-cpu": compute.precision == "tf32" and config.launch.device == "cpu",
        "cuda-graphs-with-cpu": compute.cuda_graphs and config.launch.device == "cpu",
        "micro-batch-with-cuda-graphs": compute.cuda_graphs and data.micro_batch is not None,
        "micro-batch-set": data.micro_batch is not None and bool(data.accumulation or data.batch_size),
        "nothing-to-recompute": recomputes
        and not all(pattern.strip() for pattern in str(compute.checkpoint_activations).split(",")),
    }, strategy=config.strategy, default=DEFAULT_STRATEGY)  # fmt: skip


def _raise_first(contradictions: Mapping[str, bool], **fields: Any) -> None:
    for code, is_true in contradictions.items():
        if is_true:
            raise UsageError(code=code, **fields)


def _check_network(config: TrainConfig) -> None:
    network, name = config.network, config.strategy or DEFAULT_STRATEGY
    chosen = [setting for setting in SLOW_NETWORK_SETTINGS if getattr(network, setting) is not None]
    owners = [owner for owner, info in STRATEGY_INFO.items() if "compress" in info.factory_kwargs]
    _raise_first({
        "exact-on-slow-network": bool(chosen) and name in EXACT_STRATEGIES,
        "not-for-slow-network": bool(chosen) and name in STRATEGY_INFO and name not in owners,
    }, setting=chosen[0] if chosen else "", strategy=name, allowed=owners)  # fmt: skip
    if error := find_network_settings_error(dataclasses.asdict(network)):
        raise error
    _raise_first({"ema-with-local-steps": network.local_steps is not None and config.optimizer.ema is not None})


def _check_mesh(config: TrainConfig) -> None:
    launch, compute = config.launch, config.compute
    chosen = [key for key in ("schedule_pipeline", "stages_at") if getattr(launch, key)]
    mesh, name = Mesh.parse(launch.mesh or "data=1"), config.strategy or DEFAULT_STRATEGY
    if chosen and mesh.size_of("pipeline") == 1:
        raise UsageError(code="option-needs-pipeline", setting=chosen[0])
    if launch.sequence_parallel and mesh.size_of("tensor") == 1:
        raise UsageError(code="sequence-parallel-without-tensor")
    if launch.mesh is None:
        return
    network_options = [key for key in SLOW_NETWORK_SETTINGS if getattr(config.network, key)]
    on_mesh = [name for name, info in STRATEGY_INFO.items() if info.supports_mesh]
    shares_model = mesh.has_model_parallelism
    stages, names = mesh.size_of("pipeline"), [*filter(None, (launch.stages_at or "").split(","))]
    _raise_first({
        "wrong-number-of-stages": stages > 1 and launch.stages_at is not None and len(names) != stages - 1,
        "pipeline-with-tensor": stages > 1 and mesh.size_of("tensor") > 1,
        "pipeline-with-shard": stages > 1 and mesh.size_of("shard") > 1,
        "pipeline-with-fsdp": stages > 1 and name == "fsdp",
        "micro-batch-on-mesh": shares_model and config.data.micro_batch is not None,
        "mesh-with-recomputation": shares_model and compute.checkpoint_activations is not None,
        "context-with-tensor": mesh.size_of("context") > 1 and mesh.size_of("tensor") > 1,
        "context-with-pipeline": mesh.size_of("context") > 1 and mesh.size_of("pipeline") > 1,
        "strategy-not-on-mesh": shares_model and name in STRATEGY_INFO and name not in on_mesh,
        "shard-without-fsdp": mesh.size_of("shard") > 1 and name != "fsdp",
        "mesh-with-slow-network": shares_model and bool(network_options),
        "mesh-with-compile": shares_model and compute.compile,
        "mesh-with-cuda-graphs": shares_model and compute.cuda_graphs,
        "mesh-with-sync-batchnorm": shares_model and config.model.batchnorm == "sync",
        "mesh-with-min-nproc": config.launch.min_nproc is not None,
        "mesh-with-changing-nodes": ":" in (config.cluster.nodes or ""),
    }, mesh=mesh, strategy=name, stages_at=launch.stages_at, begins=stages - 1, named=len(names),
       setting=(*network_options, "")[0], nodes=config.cluster.nodes, allowed=on_mesh)  # fmt: skip


def check_values(config: TrainConfig) -> None:
    for names, positive in ((_POSITIVE, True), (_NOT_NEGATIVE, False)):
        for name in names:
            section, key = name.split(".")
            value = getattr(getattr(config, section), key)
            if not isinstance(value, (int, float)):  # None: not set; "auto"
                continue
            if not (value > 0 if positive else value >= 0):  # NaN is neither
                raise UsageError(code="not-positive" if positive else "negative", setting=key, value=value)
            if math.isinf(value):
                raise UsageError(code="not-finite-setting", setting=key, value=value)
    _check_compute(config)
    _check_network(config)
    _check_mesh(config)
    parse_checkpoint_interval(config.checkpoint.checkpoint_every)
    if config.optimizer.ema is not None and not 0 < config.optimizer.ema < 1:
        raise UsageError(code="ema-out-of-range", value=config.optimizer.ema)
    if config.checkpoint.keep_checkpoints < 2:
        raise UsageError(code="keep-checkpoints-too-few", value=config.checkpoint.keep_checkpoints)
    if config.launch.timeout > LONGEST_TIMEOUT:
        raise UsageError(code="timeout-too-long", most=LONGEST_TIMEOUT, value=config.launch.timeout)
    if config.launch.port > 65535:
        raise UsageError(code="port-out-of-range", value=config.launch.port)
    if ":" not in config.optimizer.optimizer and config.optimizer.optimizer not in OPTIMIZERS:
        hint = ", or any other as module:name, e.g. torch.optim:RMSprop"
        raise unknown_name_error("optimizer", config.optimizer.optimizer, OPTIMIZERS, more=hint)
    if config.strategy is not None and config.strategy not in STRATEGY_INFO:
        raise unknown_name_error("strategy", config.strategy, STRATEGY_INFO)
