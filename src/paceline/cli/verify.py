"""`paceline verify`: checks that N processes compute the same as one, in float64, tensor by tensor."""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.cli import make_parser
from paceline.cli.options import check_out_file, check_positive, parse_names, parse_whole_numbers, write_json
from paceline.config.mesh import Mesh
from paceline.config.settings import parse_task_args
from paceline.config.strategies import DEFAULT_STRATEGY, EXACT_STRATEGIES, MULTI_PROCESS_STRATEGIES, STRATEGY_INFO
from paceline.errors import ExitCode, UsageError, plural
from paceline.host.cgroup import threads_per_rank, usable_cores
from paceline.lab import verify
from paceline.launch.supervise import run_workers
from paceline.protocol.job import AUTO, HangTimeout
from paceline.runs.attempt import read_attempt_end
from paceline.tasks.registry import check_task_without_import, is_session_loop

WORKER = "paceline.lab.ranks.verify"
STALL_SECONDS = 60.0  # window of the guard for a custom loop, whose epochs are short here
OPTIMIZERS = ("sgd", "adamw", verify.TASK_OPTIMIZER)


@dataclass(frozen=True)
class VerifyConfig:
    """Check that N processes compute the same as one, step by step, in float64. Exit code 1 if they differ.

    my_loop.py:main is a function that trains in a paceline.session(). It runs unchanged, with the arguments after --
    in sys.argv. With --bitwise, each number of processes trains in float32 and all bits are compared.
    """

    task: str
    """mnist-cnn, mnist-resnet18, or a custom task or loop: module:name or file.py:name"""
    ranks: str = "1,2,3"
    """numbers of processes, separated by commas; the largest is the number of virtual ranks"""
    bitwise: bool = False
    """compare the bits of all world sizes, in float32"""
    mesh: tuple[str, ...] = ()
    """device mesh, as for train, instead of --ranks. Repeatable"""
    sequence_parallel: bool = False
    """as for train"""
    schedule_pipeline: Literal["1f1b", "gpipe"] = "1f1b"
    """order of forwards and backwards in a pipeline"""
    strategies: str | None = field(
        default=None,
        metadata={"help": "strategies, separated by commas (default: "
                  f"{','.join(MULTI_PROCESS_STRATEGIES)}; with --bitwise {','.join(EXACT_STRATEGIES)})"},
    )  # fmt: skip
    optimizers: str | None = None
    """sgd, adamw or task, separated by commas (default: task if it has an optimizer, otherwise sgd,adamw)"""
    steps: int = 4
    """optimizer steps to compare; an epoch has 3 steps here"""
    seed: int = 0
    """seed of weights, order and dropout"""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "cpu"
    """device of all processes; several processes can use one GPU"""
    data_dir: Path | None = None
    """folder of IDX files (default: the packaged MNIST)"""
    stem: Literal["imagenet", "small"] | None = None
    """first layers of ResNet18"""
    task_arg: tuple[str, ...] = ()
    """NAME=VALUE, an argument of the task function. Repeatable"""
    checkpoint_activations: str | None = None
    """modules, by name or class, that the ranks recompute in backward and the single process does not"""
    json: Path | None = None
    """also write the results to this file"""


def main(arguments: Sequence[str]) -> int:
    separator = [*arguments, "--"].index("--")
    config: VerifyConfig = make_parser("verify").parse(arguments[:separator])
    loop_arguments = list(arguments[separator + 1 :])
    ranks = parse_whole_numbers("--ranks", config.ranks)
    meshes, is_loop = [Mesh.parse(mesh) for mesh in config.mesh], is_session_loop(config.task)
    if meshes and (config.bitwise or is_loop):
        subject = "--bitwise" if config.bitwise else f"{config.task}, a custom loop"
        raise UsageError(code="verify-mesh", what=subject)
    if config.sequence_parallel and not any(mesh.size_of("tensor") > 1 for mesh in meshes):
        raise UsageError(code="verify-sequence-parallel")
    chosen = config.strategies or (
        DEFAULT_STRATEGY if meshes else ",".join(EXACT_STRATEGIES if config.bitwise else MULTI_PROCESS_STRATEGIES)
    )
    strategies = parse_names("strategy", chosen, STRATEGY_INFO)
    optimizers = parse_names("optimizer", config.optimizers, OPTIMIZERS) if config.optimizers else []
    check_positive(config, "steps")
    check_out_file("--json", config.json)
    options = {name: str(value) for name in ("data_dir", "stem") if (value := getattr(config, name)) is not None}
    options |= parse_task_args(config.task_arg)
    check_task_without_import(config.task, {**options, **({"data_dir": config.data_dir} if config.data_dir else {})})
    if is_loop:
        return _verify_loop(config, ranks, strategies if config.strategies else [""], loop_arguments)
    if loop_arguments:
        raise UsageError(code="verify-arguments-of-task", arguments=" ".join(loop_arguments), task=config.task)
    spec = verify.VerifySpec(
        task=config.task,
        options=options,
        strategies=strategies,
        optimizers=optimizers,
        virtual_ranks=max(mesh.replicas for mesh in meshes) + 1 if meshes else max(ranks),  # replicas get unequal parts
        accumulation=2,
        steps=config.steps,
        seed=config.seed,
        clip_norm=1.0,
        checkpoint_activations=config.checkpoint_activations,
        device=config.device,
        sequence_parallel=config.sequence_parallel,
        schedule_pipeline=config.schedule_pipeline,
        bitwise=config.bitwise,
    )
    if config.bitwise and {*strategies} - {*EXACT_STRATEGIES}:
        raise UsageError(code="verify-bitwise", allowed=[*EXACT_STRATEGIES], value=chosen)
    return _verify(spec, meshes or ranks, config.json)


def _verify_loop(config: VerifyConfig, ranks: Sequence[int], strategies: Sequence[str], arguments: list[str]) -> int:
    """Run a loop on a single process, then on each number of processes: in float64, and with `exact` for the bits."""
    for_tasks = ("bitwise", "optimizers", "stem", "checkpoint_activations", "data_dir", "task_arg")
    default = VerifyConfig(config.task)
    if task_options := [name for name in for_tasks if getattr(config, name) != getattr(default, name)]:
        raise UsageError(code="verify-option-of-task", setting=task_options[0].replace("_", "-"), task=config.task)
    max_ranks = max(ranks)
    strategy_cases = [verify.LoopCase(max_ranks, exact=False, strategy=name) for name in strategies]
    cases = [
        verify.LoopCase(1, exact=False, plain=True),
        *strategy_cases,
        verify.LoopCase(max_ranks, exact=True, strategy="exact"),
    ]
    spec = verify.LoopSpec(config.task, arguments, cases, max_ranks, config.steps, config.seed, config.device)
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        folder = Path(name).resolve()
        ended = {size: _launch(spec, size, folder)[1] for size in sorted({1, *ranks})}
        from paceline.lab.ranks.loop_findings import make_verify_reports  # imports torch

        report, bits = make_verify_reports(folder, spec, ranks, ended)
    print(
        f"{config.task}, {config.steps} steps: a single process compared with {', '.join(map(str, ranks))} processes "
        f"as {max_ranks} virtual ranks; short epochs with unequal batches, float64, no dropout, batch norm in eval mode"
    )
    if config.json:
        write_json(config.json, [report, bits])
    equal = verify.print_report(None, [report])
    return ExitCode.DONE if (not bits or verify.compare_and_print_digests(None, bits)) and equal else ExitCode.FAILED


def _verify(spec: verify.VerifySpec, sizes: Sequence[int | Mesh], json: Path | None) -> int:
    report_type, print_all = verify.VerifyReport, verify.print_report
    if spec.bitwise:
        report_type, print_all = verify.DigestReport, verify.compare_and_print_digests
    reports: list[Any] = []
    for size in sizes:
        nproc, mesh = (size, "") if isinstance(size, int) else (size.size, str(size))
        print(f"{plural(nproc, 'process', 'processes')} {mesh} ...", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(prefix="paceline-verify-")).resolve()
        code, _ = _launch(msgspec.structs.replace(spec, mesh=mesh), nproc, folder)
        if code != ExitCode.DONE:  # the logs stay
            return code
        reports.append(msgspec.json.decode((folder / "report.json").read_bytes(), type=report_type))
        shutil.rmtree(folder)
    if json:
        write_json(json, reports)
    return ExitCode.DONE if print_all(spec, reports) else ExitCode.FAILED


def _launch(spec: verify.VerifySpec | verify.LoopSpec, nproc: int, folder: Path) -> tuple[int, str]:
    """Run the workers of one world size; return the exit code and the agent's report of a failure."""
    attempt, files = folder / f"attempt-{nproc}", [str(folder / name) for name in ("spec.json", "report.json")]
    Path(files[0]).write_bytes(msgspec.json.encode(spec))
    hang_timeout = HangTimeout(seconds=STALL_SECONDS) if isinstance(spec, verify.LoopSpec) else AUTO
    threads = threads_per_rank(usable_cores(), nproc)
    code = run_workers(WORKER, files, attempt, nproc, threads, hang_timeout=hang_timeout)
    return code, ended.words if (ended := read_attempt_end(attempt)) else ""
