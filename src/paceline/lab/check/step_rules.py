"""The rules about gradients, weights, accumulation windows, buffers, files and machines, as pure functions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import or_

from msgspec.structs import replace

from paceline.guard.sentences import format_ranks
from paceline.lab.check.findings import Finding, differs
from paceline.protocol.facts import ORDER, RECORDED_EPOCHS, FileAccess, OptimizerStep, ScriptFacts, SeenLoader

TOLERANCE = 1e-3  # relative; the order of summation changes the rounding
MIN_STEPS = 4  # of an optimizer, to use the majority of its steps
BYPASSED_DDP_FIELDS = {
    "rule": "gradients",
    "words": "gradients are not averaged: the script calls the inner model instead of the DDP model",
    "type_instead": "call the DDP model: ddp(x), not ddp.module(x) or a method of ddp.module",
}
MAX_LISTED = 3  # parts of a state in a message
MIN_OBSERVED = 8  # steps or forwards, before a rule makes a statement about all of them
MIN_LENGTH_RATIO = 1.5  # of a schedule for one process to the steps of a rank
StepRows = list[list[OptimizerStep]]  # the same step of each rank


def step_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    if len(ranks) > 1:
        yield from gradient_findings(ranks)
        yield from _step_count_findings(ranks)
        yield from _buffer_findings(ranks)
        yield from _file_findings(ranks)
        yield from _file_load_findings(ranks)
    cleared_findings = [*_cleared_gradient_findings(ranks[0])]
    yield from cleared_findings or _accumulation_window_findings(ranks[0])
    yield from _unused_parameter_findings(ranks)
    yield from _thread_findings(ranks[0])
    yield from _learning_rate_findings(ranks[0])
    yield from _schedule_findings(ranks[0])
    yield from _saved_state_findings(ranks)


def session_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    """The findings about a script with a session. The session itself raises an error if a different rule applies."""
    text = "the script trains in a paceline.session(), which checks samples, gradients and weights while it trains"
    fix = "paceline verify FILE.py:FUNCTION, to compare the loop with one process"
    yield Finding("session", "note", text, ranks[0].steps[0].site if ranks[0].steps else "", fix)
    yield from (*_file_findings(ranks), *_file_load_findings(ranks), *_thread_findings(ranks[0]))


def _step_count_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    uses_join = any(replica.joined for facts in ranks for replica in facts.replicas)
    counts = [len(next(iter(synced_steps_by_optimizer(facts)), [])) for facts in ranks]
    if all(facts.ended for facts in ranks) and differs(counts) and not uses_join and all(counts):
        by_rank = ", ".join(f"rank {facts.rank}: {count}" for facts, count in zip(ranks, counts, strict=True))
        fix = "the same number of batches on each rank: DistributedSampler, or `with Join([model]):`"
        site = synced_steps_by_optimizer(ranks[0])[0][0].site
        yield Finding("uneven steps", "wrong", "ranks take different numbers of steps", site, fix, by_rank)


def _cleared_gradient_findings(facts: ScriptFacts) -> Iterator[Finding]:
    """Accumulated gradients that are cleared before most steps, not only now and then, as after an overflow."""
    for steps in synced_steps_by_optimizer(facts):
        early_steps = [step for step in steps if step.loader < 0 or step.epoch <= RECORDED_EPOCHS]
        affected = [step for step in early_steps if step.lost and (step.loader >= 0 or _divides(step))]
        if len(affected) < 2 or len(affected) <= len(early_steps) / 2:
            continue
        count, total = Counter((step.lost, step.backwards) for step in affected).most_common(1)[0][0]
        text = f"the gradients of {count} of {total} micro-batches are cleared before the optimizer step"
        fix = "optimizer.zero_grad() only after optimizer.step(), not before each backward()"
        site = affected[0].clear_site or affected[0].backward_site
        yield Finding("lost gradients", "wrong", text, site, fix, f"at {len(affected)} of {len(early_steps)} steps")
        return


def _divides(step: OptimizerStep) -> bool:
    """Whether the loss is divided by the number of micro-batches, which shows that they should accumulate."""
    return any(round(factor * step.backwards, 3) == 1 for factor in step.factors)


def _accumulation_window_findings(facts: ScriptFacts) -> Iterator[Finding]:
    optimizers = synced_steps_by_optimizer(facts)
    if not optimizers or differs(tuple(step.backwards for step in steps) for steps in optimizers):
        return  # optimizers that alternate, as in a GAN, have no common window
    steps = [step for step in optimizers[0] if step.epoch <= RECORDED_EPOCHS and step.loader >= 0]
    window = Counter(step.backwards for step in steps).most_common(1)[0][0] if steps else 0
    if window < 2:
        return
    rest = facts.loaders[steps[0].loader].batches % window
    site, is_clean = steps[0].backward_site, True
    usual_factors = [_factor(step) for step in steps if step.backwards == window]
    for step, next_step in pairwise([*steps, OptimizerStep(-1, "")]):
        is_scaled = round(step.scaled * window, 3) == 1
        is_full = is_scaled or any(round(factor * window, 3) == 1 for factor in step.factors)
        is_full = is_full and any(math.isclose(_factor(step), usual, rel_tol=1e-3) for usual in usual_factors)
        if rest and step.backwards < window and next_step.epoch != step.epoch and is_full and is_clean:
            is_clean, site = False, step.site if is_scaled else site
            count = step.backwards
            text = f"the last window of an epoch has {count} micro-batches, but the loss is divided by {window}"
            fix = f"loss / min({window}, len(loader) - first micro-batch of the window)"
            evidence = f"its gradient has {count}/{window} of the right size"
            yield Finding("last window", "wrong", text, site, fix, evidence)
    for dropped in facts.dropped if rest else ():
        is_rest = dropped.backwards == rest and dropped.optimizer == 0
        if is_clean and is_rest and dropped.epoch <= RECORDED_EPOCHS:
            is_clean = False
            outcome = "are never used" if dropped.cleared else "are added to the first step of the next epoch"
            text = f"the gradients of the last {dropped.backwards} micro-batches of an epoch {outcome}"
            fix = f"also step at the last micro-batch: if (i + 1) % {window} == 0 or i + 1 == len(loader)"
            yield Finding("last window", "wrong", text, steps[0].site, fix, f"windows have {window} micro-batches")
    if is_clean:
        yield Finding("last window", "right", f"windows of {window} micro-batches end with each epoch", site)


def _factor(step: OptimizerStep) -> float:
    """The product of all factors of the loss and of the gradients. It differs in a short window that is right."""
    return math.prod(step.factors) * step.scaled


def _buffer_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    for replicas in zip(*(facts.replicas for facts in ranks), strict=False):
        buffer_rows = [*zip(*(replica.buffers for replica in replicas), strict=False)]
        site = replicas[0].evaluation_site
        if any(differs(row) for row in buffer_rows):
            text = "each rank evaluates with different batch norm statistics"
            fix = "evaluate through the DDP model, which broadcasts rank 0's buffers; or use SyncBatchNorm"
            yield Finding("batch norm", "wrong", text, site, fix, "buffers differ when evaluation begins")
        elif buffer_rows:
            yield Finding("batch norm", "right", "buffers are equal on all ranks when evaluation begins", site)


def _file_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    writers = _files_by_path(ranks, "saved_files")
    shared: defaultdict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for (_, path), places in writers.items():
        if len(places) > 1:
            shared[next(iter(places.values())).site].append((path, [*places]))
    for site, files in shared.items():
        path, of = files[0]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        fix = "`if dist.get_rank() == 0:` before it, or put the rank into the file name"
        if ranks[0].session:
            fix = "s.save(model, path) for weights, and `if s.rank == 0:` before other files"
        evidence = f"{format_ranks(of)}: {path}{more}"
        yield Finding("one file", "wrong", "several ranks write the same file", site, fix, evidence)
    if writers and not shared:
        yield Finding("one file", "right", "no two ranks write the same file")


def _files_by_path(ranks: Sequence[ScriptFacts], attribute: str) -> dict[tuple[str, str], dict[int, FileAccess]]:
    by_place: dict[tuple[str, str], dict[int, FileAccess]] = {}
    for facts in ranks:
        for file in getattr(facts, attribute):
            by_place.setdefault((facts.host, file.path), {})[facts.rank] = file
    return by_place


def _file_load_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    for (_, path), places in _files_by_path(ranks, "loaded_files").items():
        wrong_device = [rank for rank, file in places.items() if set(file.devices) - {file.own_device}]
        if wrong_device and not differs(tuple(file.devices) for file in places.values()):
            file = places[wrong_device[0]]
            text = f"all ranks load to GPU {file.devices[0]} and fill its memory"
            fix = "torch.load(path, map_location=device), or map_location='cpu'"
            yield Finding("one GPU", "costs", text, file.site, fix, f"{format_ranks(wrong_device)}: {path}")


def _unused_parameter_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    for replicas in zip(*(facts.replicas for facts in ranks), strict=False):
        first, is_observed = replicas[0], min(replica.looked for replica in replicas) >= MIN_OBSERVED
        if first.find_unused and is_observed and not max(replica.unused for replica in replicas):
            text = "find_unused_parameters=True is not needed: DDP traverses the whole graph in each step"
            fix = "TrainingArguments(ddp_find_unused_parameters=False)" if first.by_library else "omit it"
            evidence = f"all parameters were used in {first.looked} forwards on all ranks"
            yield Finding("unused parameters", "note" if first.by_library else "costs", text, first.site, fix, evidence)


def _thread_findings(facts: ScriptFacts) -> Iterator[Finding]:
    per_rank = max(1, facts.cores // max(1, facts.local_world))
    if facts.threads > per_rank:
        call = "session(threads={})" if facts.session else "torch.set_num_threads({})"
        fix = call.format(per_rank) if facts.threads_site else f"--threads-per-rank {per_rank}"
        text = "there are more threads than cores"
        evidence = f"{facts.local_world} ranks x {facts.threads} threads on {facts.cores} cores"
        yield Finding("threads", "costs", text, facts.threads_site, fix, evidence)
    elif facts.threads:
        yield Finding("threads", "right", f"{facts.local_world} ranks x {facts.threads} threads, {facts.cores} cores")


def _training_loader(facts: ScriptFacts) -> SeenLoader | None:
    return next((loader for loader in facts.loaders if loader.training_passes and not loader.local_only), None)


def _learning_rate_findings(facts: ScriptFacts) -> Iterator[Finding]:
    loader, steps = _training_loader(facts), synced_steps(facts)
    if loader is None or not steps or not loader.training_passes[0].sizes or facts.world // facts.split < 2:
        return
    batch = loader.training_passes[0].sizes[0]
    rate = max(step.learning_rate for step in steps)  # a warm-up begins with 0
    replicas = facts.world // facts.split
    text = f"{replicas} ranks x batch {batch} = {replicas * batch} samples, learning rate {rate:g}"
    fix = "decide whether to scale the rate with the world size: lr * world_size (SGD), lr * world_size ** 0.5 (Adam)"
    yield Finding("learning rate", "note", text, loader.constructed_at, fix)


def _schedule_findings(facts: ScriptFacts) -> Iterator[Finding]:
    """A schedule that steps with each batch, and is exactly as long as a training on one process."""
    loader = _training_loader(facts)
    if loader is None or not facts.ended or loader.batch_size < 1 or loader.samples < 1 or loader.batches < 1:
        return
    epochs, steps = len(loader.training_passes), len(synced_steps(facts))
    lengths = {epochs * -(-loader.samples // loader.batch_size), epochs * (loader.samples // loader.batch_size)}
    for schedule in facts.schedules:
        per_batch = schedule.steps == steps == sum(len(p.sizes) for p in loader.passes)
        if per_batch and schedule.length in lengths and min(lengths) > MIN_LENGTH_RATIO * epochs * loader.batches:
            text = "the learning rate schedule has the length of a training on one process: ranks never reach its end"
            fix = "epochs * len(loader), which counts the batches of one rank"
            evidence = f"created at {schedule.made} with {schedule.length} steps; {epochs} epochs have "
            yield Finding("schedule", "wrong", text, schedule.site, fix, f"{evidence}{epochs * loader.batches}")


def gradient_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    findings = [*_optimizer_findings(ranks)]
    has_mistake = any(finding.level == "wrong" for finding in findings)
    first = next((step for facts in ranks for step in _steps_bypassing_ddp(facts)), None)
    if first is not None and has_mistake:  # between steps through DDP
        site = next((ddp.past_site for facts in ranks for ddp in facts.replicas if ddp.past_site), first.site)
        findings = [replace(f, **BYPASSED_DDP_FIELDS, site=site) if f.rule == "replicas" else f for f in findings]
    elif first is not None:
        outside = [facts.rank for facts in ranks if any(_steps_bypassing_ddp(facts))]
        text = f"{format_ranks(outside)} {'continues' if len(outside) == 1 else 'continue'} to train alone, outside DDP"
        fix = "ddp(x), not ddp.module(x), if this is not intended"
        findings.append(Finding("past DDP", "note", text, first.backward_site, fix, "after steps through DDP"))
    yield from findings


def _steps_bypassing_ddp(facts: ScriptFacts) -> Iterator[OptimizerStep]:
    """The steps without a forward of the DDP model, except a first one that used a different optimizer's forward."""
    by_optimizer: defaultdict[int, list[OptimizerStep]] = defaultdict(list)
    for step in facts.steps:
        by_optimizer[step.optimizer].append(step)
    for steps in by_optimizer.values():
        only_first = steps[0].past and len(steps) > 1 and not steps[1].past
        yield from (step for step in steps[only_first:] if step.past)


def _optimizer_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    reported = set[str]()
    for steps_by_rank in zip(*map(synced_steps_by_optimizer, ranks), strict=False):
        rows, note = _without_private_parameters(_joint_rows(steps_by_rank), replicas=bool(ranks[0].replicas))
        if note is not None:
            yield note
        if not rows or differs(step.shapes for step in rows[0]) or not rows[0][0].gradients:
            continue
        unequal = [row for row in rows if differs(step.gradients for step in row)]
        start_differs = differs(step.parameters for step in rows[0])
        first, measured = rows[0][0], [row for row in rows if all(step.local for step in row)]
        if unequal:
            when = f"at {len(unequal)} of {len(rows)} steps"
            unaveraged = _unaveraged_gradient_finding(ranks[0], unequal[0][0], when, start_differs=start_differs)
            finding = _local_sgd_note(rows) or unaveraged
            if finding.words not in reported:
                yield finding
            reported.add(finding.words)
        elif len(measured) >= MIN_OBSERVED and all(map(_is_sum, measured)):
            text = "gradients are summed over ranks, not averaged: steps are too large by the number of ranks"
            fix = "parameter.grad /= dist.get_world_size(), after the sum; or DistributedDataParallel(model)"
            yield Finding("gradients", "wrong", text, first.site, fix, f"at {len(measured)} of {len(rows)} steps")
        else:
            yield Finding("gradients", "right", f"gradients are equal on all ranks at {len(rows)} steps", first.site)
            yield from _clipping_findings(rows)
            if not start_differs and (drift := _drift_finding(ranks[0], rows)) is not None:
                yield drift
        if start_differs and (ranks[0].replicas or not unequal):
            site = ranks[0].replicas[0].site if ranks[0].replicas else first.site
            fix = "DistributedDataParallel(model), which broadcasts rank 0's weights; or one torch.manual_seed for all"
            text = "ranks start from different weights"
            yield Finding("different start", "wrong", text, site, fix, "they differ before the first step")
        elif not start_differs:
            yield Finding("different start", "right", "all ranks start from the same weights", first.site)


def _without_private_parameters(rows: StepRows, *, replicas: bool) -> tuple[StepRows, Finding | None]:
    """The steps without the private parameters of each rank, and a note about these.

    Private parameters are shards of a classifier or of a table, or experts. They belong to no replica, and their
    gradients differ. Some of them differ from the start, and ranks exchange tensors between forward and backward. If
    there are no other parameters and no DDP, the model is not wrapped, and the steps stay as they are.
    """
    detailed = [row for row in rows if all(step.each for step in row)]
    if not detailed or differs(len(step.each) for row in detailed for step in row):
        return rows, None
    outside = set[int].intersection(*(set(step.outside) for row in detailed for step in row))
    private = {n for n in outside if any(differs(step.each[n] for step in row) for row in detailed)}
    first, exchanges = detailed[0], sum(all(step.exchanged for step in row) for row in detailed)
    shared = [n for n in range(len(first[0].each)) if n not in private]
    if not any(differs(step.each_before[n] for step in first) for n in private):
        return rows, None
    if 2 * exchanges <= len(detailed) or not (shared or replicas):
        return rows, None
    text = f"{len(private)} parameters are private to each rank: they differ from the start, and ranks exchange outputs"
    fix = "DistributedDataParallel(model) with them in the model, if they should be equal"
    note = Finding("own parameters", "note", text, first[0].site, fix, f"in {exchanges} of {len(detailed)} steps")
    return [[_of_parameters(step, shared) for step in row] for row in detailed], note


def _of_parameters(step: OptimizerStep, indices: Sequence[int]) -> OptimizerStep:
    gradients, before, after = (
        ",".join(digests[n] for n in indices if n < len(digests))
        for digests in (step.each, step.each_before, step.each_after)
    )
    return replace(step, gradients=gradients, parameters=before, after=after, shapes="", strangers=0)


def _joint_rows(steps_by_rank: Sequence[Sequence[OptimizerStep]]) -> StepRows:
    """The first, second, ... step of each epoch on all ranks, without the extra steps of some ranks with Join."""
    rows: defaultdict[tuple[int, int], list[OptimizerStep]] = defaultdict(list)
    for steps in steps_by_rank:
        count: Counter[int] = Counter()
        for step in steps:
            rows[step.epoch, count[step.epoch]].append(step)
            count[step.epoch] += 1
    return [row for row in rows.values() if len(row) == len(steps_by_rank)]


def _is_sum(row: Sequence[OptimizerStep]) -> bool:
    total, applied = sum(step.local for step in row), row[0].applied
    size = sum(abs(step.local) for step in row)
    return abs(applied - total) < TOLERANCE * size and abs(total) > 10 * TOLERANCE * size


def averages_gradients(ranks: Sequence[ScriptFacts]) -> bool:
    """Whether DDP, or the script itself, averages gradients with the same weight for each rank."""
    rows = [
        row for by_rank in zip(*map(synced_steps_by_optimizer, ranks), strict=False) for row in _joint_rows(by_rank)
    ]
    measured = [row for row in rows if all(step.local for step in row)]
    return any(facts.replicas for facts in ranks) or any(map(_is_mean, measured))


def _is_mean(row: Sequence[OptimizerStep]) -> bool:
    mean, size = sum(step.local for step in row) / len(row), sum(abs(step.local) for step in row)
    return abs(row[0].applied - mean) < TOLERANCE * size


def _local_sgd_note(rows: Sequence[Sequence[OptimizerStep]]) -> Finding | None:
    """A note if weights become equal again after steps with different gradients, which is the purpose of local SGD."""
    apart = [differs(step.gradients for step in row) for row in rows]
    start_weights = rows[apart.index(True)][0].parameters
    equal = [
        row[0].parameters not in ("", start_weights) and not differs(step.parameters for step in row)
        for row, diverged in zip(rows[1:], accumulate(apart, or_), strict=False)
        if diverged
    ]
    if not any(equal):
        return None
    text = "ranks step with different gradients, and average their weights later (local SGD)"
    fix = "DistributedDataParallel(model), if this is not intended"
    seen = f"gradients differ at {sum(apart)} of {len(rows)} steps; weights are equal again before {sum(equal)} of them"
    return Finding("gradients", "note", text, rows[0][0].site, fix, seen)


def _clipping_findings(rows: Sequence[Sequence[OptimizerStep]]) -> Iterator[Finding]:
    """Gradients that differ when they are clipped, but are equal at the step, are averaged after the clipping."""
    for row in rows:
        norms = [step.norm for step in row]
        if max(norms) - min(norms) > TOLERANCE * max(norms) and any(step.norm > step.limit > 0 for step in row):
            text = "gradients are clipped before they are averaged: each rank uses a different norm"
            fix = "clip_grad_norm_ after the gradients are averaged, before optimizer.step()"
            evidence = f"clipped to {row[0].limit:g}; norms by rank {', '.join(f'{norm:.3g}' for norm in norms)}"
            yield Finding("clipping", "wrong", text, row[0].clip_site, fix, evidence)
            return


def _drift_finding(facts: ScriptFacts, rows: Sequence[Sequence[OptimizerStep]]) -> Finding | None:
    """The point at which equal weights of replicas become different, although all gradients are equal."""
    previous: Sequence[OptimizerStep] = ()
    for number, row in enumerate(rows, 1):
        if differs(step.parameters for step in row):
            changed = [rank for rank, (a, b) in enumerate(zip(previous, row, strict=False)) if a.after != b.parameters]
            text = "the script changes weights between two steps, and they then differ between ranks"
            fix = "change weights in the same way on all ranks, without `if rank == ...` or per-rank random numbers"
            evidence = f"{format_ranks(changed)}: between steps {number - 1} and {number}"
            return Finding("replicas", "wrong", text, row[0].site, fix, evidence)
        if differs(step.after for step in row):
            return _unequal_step_finding(facts, row, number)
        previous = row
    return None


def _unequal_step_finding(facts: ScriptFacts, row: Sequence[OptimizerStep], number: int) -> Finding:
    site, evidence = row[0].site, f"at step {number}"
    plateau = next((schedule for schedule in facts.schedules if schedule.name == "ReduceLROnPlateau"), None)
    if differs(step.learning_rate for step in row):
        text = "ranks step with different learning rates: their weights drift apart"
        fix = "the same learning rate on all ranks"
        evidence += ": " + ", ".join(f"{step.learning_rate:g} on rank {rank}" for rank, step in enumerate(row))
        if plateau is not None:
            site = plateau.site
            fix = "pass the mean over all ranks to scheduler.step: dist.all_reduce(loss), then loss / world_size"
    elif differs(step.settings for step in row):
        text = "ranks step with different optimizer settings: their weights drift apart"
        fix = "the same weight decay, momentum, ... on all ranks"
    else:
        text = "the optimizer step gives different weights on ranks with equal gradients"
        fix = "the same optimizer on all ranks; do not change its state on one rank only"
    return Finding("replicas", "wrong", text, site, fix, evidence)


def _unaveraged_gradient_finding(facts: ScriptFacts, step: OptimizerStep, when: str, *, start_differs: bool) -> Finding:
    replica = facts.replicas[0] if facts.replicas else None
    if replica is None:
        suffix = ", and ranks start from different weights" if start_differs else ""
        text = f"gradients are never averaged over ranks: no model is wrapped{suffix}"
        fix, site = "model = DistributedDataParallel(model), before you create the optimizer", step.site
    elif not step.forwards and replica.past_site:
        text, fix, site = BYPASSED_DDP_FIELDS["words"], BYPASSED_DDP_FIELDS["type_instead"], replica.past_site
    elif step.synced < step.forwards and replica.no_sync_site:
        text = "gradients are not averaged: the last micro-batch before a step is also inside no_sync()"
        fix, site = "run the last micro-batch of each window outside no_sync()", replica.no_sync_site
    elif not step.forwards:
        text = "gradients are not averaged: the script has not called a DDP model since the last step"
        fix, site = "call the DDP model: ddp(x), not a method of ddp.module", step.backward_site
    elif step.strangers:
        text = f"gradients of {step.strangers} parameters are not averaged: the DDP model does not have them"
        fix, site = "put all layers into the model first, then create DistributedDataParallel(model)", step.site
    else:
        text = "gradients differ between ranks when the optimizer steps"
        fix = "pass only parameters of the DDP model to the optimizer, and do not change gradients on one rank only"
        site = step.site
    return Finding("gradients", "wrong", text, site, fix, f"they differ {when}")


def synced_steps_by_optimizer(facts: ScriptFacts) -> list[list[OptimizerStep]]:
    """The steps that ranks take together, by optimizer.

    First those of replicas, then those that mostly involve collectives. If there are any, all other steps are private
    to the rank. So are steps outside DDP after steps through it.
    """
    by_optimizer: defaultdict[int, list[OptimizerStep]] = defaultdict(list)
    for step in facts.steps:
        if not step.past:
            by_optimizer[step.optimizer].append(step)
    all_steps = [by_optimizer[number] for number in sorted(by_optimizer)]
    replicated = [steps for steps in all_steps if any(step.own for step in steps)]
    others = [steps for steps in all_steps if steps not in replicated and len(steps) >= MIN_STEPS]
    joint = [steps for steps in others if 2 * sum(step.met for step in steps) > len(steps)]
    return [*replicated, *joint] or all_steps


def synced_steps(facts: ScriptFacts) -> list[OptimizerStep]:
    return [step for steps in synced_steps_by_optimizer(facts) for step in steps]


def _saved_state_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    """Whether a resume from the checkpoints of a framework continues this training."""
    for facts in ranks:
        for state in facts.saved_states:
            rule, names = "saved state", ", ".join(state.missing[:MAX_LISTED])
            if state.weights_only:
                text = f"{state.name} has the weights only: a resume begins with a new optimizer"
                yield Finding(rule, "note", text, state.site)
            elif state.open_window:
                text = (
                    f"{state.name} is saved within an accumulation window: a resume loses the gradients of the window"
                )
                fix = "save where accelerator.sync_gradients is True"
                yield Finding(rule, "wrong", text, state.site, fix)
            elif state.missing:
                text = f"a resume from {state.name} does not continue this training: it lacks {names}"
                fix = (
                    "accelerator.prepare, or register_for_checkpointing, for each model, optimizer and schedule; save "
                )
                fix += "all that is trained"
                seen = f"{len(state.missing)} of {state.parts} parts are not in it, or with different values"
                yield Finding(rule, "wrong", text, state.site, fix, seen)
            elif state.random:
                text = f"{state.name} has no random states ({', '.join(state.random)}): dropout and order differ after "
                fix = "DataLoaderConfiguration(use_seedable_sampler=True), and loader.set_epoch(epoch)"
                yield Finding(rule, "note", f"{text}a resume", state.site, fix if ORDER in state.random else "")
            elif state.parts:
                text = f"{state.name} has the whole state of the training, bit for bit"
                yield Finding(rule, "right", text, state.site)
