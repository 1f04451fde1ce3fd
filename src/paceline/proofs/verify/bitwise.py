"""A rank of `paceline verify --bitwise`: trains as the run is defined, and hands over the bits of every step.

`python -m paceline.proofs.verify.bitwise SPEC REPORT`, started once for each world size. There is no reference here:
the world sizes are compared with each other.
"""

import gc
from collections.abc import Sequence

import msgspec

from paceline.checkpoint.whole import sha256_of, whole
from paceline.collectives.control import gather_words, together
from paceline.proofs.verify.setup import (
    Setting,
    apply_strategy,
    has_batch_norm,
    make_setting,
    optimizers_of,
    task_of,
    write_report,
)
from paceline.proofs.verify.trial import parameters_of
from paceline.train.determinism import deterministic, holds_for
from paceline.train.prepare import make_model
from paceline.train.step import train_step
from paceline.verify.spec import Bits, BitsReport, Spec, StepBits
from paceline.worker.attach import run_worker
from paceline.worker.world import World


def collect_bits(spec: Spec, world: World) -> BitsReport:
    """Train every strategy with every optimizer (a collective); rank 0's report counts."""
    with together(world):
        task = task_of(spec)
        model = make_model(task, spec.seed, world)
        optimizers = optimizers_of(spec, task, model)
        policy = "local" if has_batch_norm(model) else "none"
    setting = make_setting(spec, task, policy, world)
    bits = [_train(setting, strategy, optimizer) for strategy in spec.strategies for optimizer in optimizers]
    return BitsReport(world.size, setting.plan.global_batch, setting.plan.num_samples, bits, holds_for(world.device))


def _train(setting: Setting, strategy: str, optimizer: str) -> Bits:
    gc.collect()  # the last round's models hang in cycles of hooks and closures
    spec, world = setting.spec, setting.world
    model = make_model(setting.task, spec.seed + world.rank, world)
    replica, batches = apply_strategy(setting, strategy, optimizer, model)
    steps: list[StepBits] = []
    for microbatches in batches:
        result = train_step(replica, microbatches, setting.task.loss, max_norm=spec.clip_norm)
        norm = float(result.grad_norm or 0.0).hex()
        gradients = whole(replica.gradients(), world)
        steps.append(StepBits(result.loss.hex(), norm, sha256_of(gradients), sha256_of(parameters_of(replica))))
    with replica.merged_buffers():
        weights = sha256_of(replica.weights())
    state = whole(replica.state(), world)
    everybody = gather_words([weights, [msgspec.to_builtins(step) for step in steps]], world)
    same = all(each == everybody[0] for each in everybody)
    return Bits(strategy, optimizer, weights, sha256_of(state), steps, same)


def main(arguments: Sequence[str]) -> int:
    """Run the spec in file `arguments[0]`; rank 0 writes the report into file `arguments[1]`."""
    return write_report(arguments, deterministic()(collect_bits), timeout_seconds=300)


if __name__ == "__main__":
    run_worker(main)
