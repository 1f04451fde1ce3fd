"""The pitfalls of gradients, weights, windows, buffers, files and machines: pure rules over the facts of all ranks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import or_

from msgspec.structs import replace

from paceline.guard.sentences import format_ranks
from paceline.lab.check.findings import Remark, differs
from paceline.protocol.facts import EPOCHS, PlacedFile, ScriptFacts, SeenLoader, SeenStep

CLOSE = 1e-3  # sums of floats in another order
LEAST_STEPS = 4  # of an optimizer, before most of them say anything
PAST = {
    "rule": "gradients",
    "words": "gradients are not averaged: the model is called past DDP",
    "type_instead": "call the DDP model itself: ddp(x), not ddp.module(x), or a method of it",
}
LEAST_LOOKS = 8  # steps or forwards, before a rule makes a statement about all of them
LONGER = 1.5  # ranks have a half of the steps of one process, or less


def step_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    """All of them."""
    if len(ranks) > 1:
        yield from gradient_findings(ranks)
        yield from _counts(ranks)
        yield from _buffers(ranks)
        yield from _files(ranks)
        yield from _loads(ranks)
    lost = [*_lost(ranks[0])]
    yield from lost or _windows(ranks[0])
    yield from _unused(ranks)
    yield from _threads(ranks[0])
    yield from _rate(ranks[0])
    yield from _schedule(ranks[0])


def session_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    """Of a script that trains in a session, which raises an error for what the other rules look for."""
    text = "the script trains in a paceline.session(), which checks samples, gradients and weights while it trains"
    fix = "paceline verify FILE.py:FUNCTION, which compares the loop with one process"
    yield Remark("session", "note", text, ranks[0].steps[0].site if ranks[0].steps else "", fix)
    yield from (*_files(ranks), *_loads(ranks), *_threads(ranks[0]))


def _counts(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    joined = any(replica.joined for facts in ranks for replica in facts.replicas)
    counts = [len(next(iter(steps_of(facts)), [])) for facts in ranks]
    if all(facts.ended for facts in ranks) and differs(counts) and not joined and all(counts):
        told = ", ".join(f"rank {facts.rank}: {count}" for facts, count in zip(ranks, counts, strict=True))
        fix = "the same number of batches on each rank: DistributedSampler, or `with Join([model]):`"
        yield Remark(
            "uneven steps", "wrong", "ranks take different numbers of steps", steps_of(ranks[0])[0][0].site, fix, told
        )


def _lost(facts: ScriptFacts) -> Iterator[Remark]:
    """Gradients that are accumulated and cleared before the step: usual, not now and then, as after an overflow."""
    for steps in steps_of(facts):
        seen = [step for step in steps if step.loader < 0 or step.epoch <= EPOCHS]
        lost = [step for step in seen if step.lost and (step.loader >= 0 or _divides(step))]
        if len(lost) < 2 or len(lost) <= len(seen) / 2:
            continue
        count, of = Counter((step.lost, step.backwards) for step in lost).most_common(1)[0][0]
        text = f"the gradients of {count} of {of} micro-batches are cleared before the optimizer steps"
        fix = "optimizer.zero_grad() only after optimizer.step(), not in front of each backward()"
        site = lost[0].clear_site or lost[0].backward_site
        yield Remark("lost gradients", "wrong", text, site, fix, f"at {len(lost)} of {len(seen)} steps")
        return


def _divides(step: SeenStep) -> bool:
    """Whether its loss is divided by the number of micro-batches: then they are meant to be accumulated."""
    return any(round(factor * step.backwards, 3) == 1 for factor in step.factors)


def _windows(facts: ScriptFacts) -> Iterator[Remark]:
    optimizers = steps_of(facts)
    if not optimizers or differs(tuple(step.backwards for step in steps) for steps in optimizers):
        return  # several that step in turn, as a GAN's: their windows mean something else
    steps = [step for step in optimizers[0] if step.epoch <= EPOCHS and step.loader >= 0]
    window = Counter(step.backwards for step in steps).most_common(1)[0][0] if steps else 0
    if window < 2:
        return
    rest = facts.loaders[steps[0].loader].batches % window
    site, clean = steps[0].backward_site, True
    whole = [_factor(step) for step in steps if step.backwards == window]
    for step, after in pairwise([*steps, SeenStep(-1, "")]):
        scaled = round(step.scaled * window, 3) == 1
        full = scaled or any(round(factor * window, 3) == 1 for factor in step.factors)
        full = full and any(math.isclose(_factor(step), usual, rel_tol=1e-3) for usual in whole)
        if rest and step.backwards < window and after.epoch != step.epoch and full and clean:
            clean, site = False, step.site if scaled else site
            text = f"the last window of an epoch has {step.backwards} micro-batches, and is divided by {window}"
            fix = f"loss / min({window}, len(loader) - first micro-batch of the window)"
            seen = f"its gradient has {step.backwards}/{window} of its size"
            yield Remark("last window", "wrong", text, site, fix, seen)
    for left in facts.dropped:
        if rest and left.epoch <= EPOCHS and left.backwards == rest and left.optimizer == 0 and clean:
            clean = False
            what = "are never used" if left.cleared else "go into the first step of the next epoch"
            text = f"the gradients of the last {left.backwards} micro-batches of an epoch {what}"
            fix = f"step at the last one, too: if (i + 1) % {window} == 0 or i + 1 == len(loader)"
            yield Remark("last window", "wrong", text, steps[0].site, fix, f"windows have {window} micro-batches")
    if clean:
        yield Remark("last window", "right", f"windows of {window} micro-batches end with each epoch", site)


def _factor(step: SeenStep) -> float:
    """What its loss and its gradients were multiplied by, together: a short window that is right has another one."""
    return math.prod(step.factors) * step.scaled


def _buffers(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    for replicas in zip(*(facts.replicas for facts in ranks), strict=False):
        evaluated = [*zip(*(replica.buffers for replica in replicas), strict=False)]
        site = replicas[0].evaluation_site
        if any(differs(row) for row in evaluated):
            text = "each rank evaluates with batch norm statistics of its own"
            fix = "evaluate through the DDP model, which sends rank 0's buffers; or SyncBatchNorm"
            yield Remark("batch norm", "wrong", text, site, fix, "buffers differ between ranks when evaluation begins")
        elif evaluated:
            yield Remark("batch norm", "right", "buffers are equal on all ranks when evaluation begins", site)


def _files(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    writers = _by_place(ranks, "written")
    shared: defaultdict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for (_, path), places in writers.items():
        if len(places) > 1:
            shared[next(iter(places.values())).site].append((path, [*places]))
    for site, files in shared.items():
        path, of = files[0]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        fix = "if dist.get_rank() == 0: in front of it; or the rank in the file's name"
        if ranks[0].session:
            fix = "s.save(model, path) for weights; if s.rank == 0: in front of other files"
        yield Remark(
            "one file", "wrong", "several ranks write one file", site, fix, f"{format_ranks(of)}: {path}{more}"
        )
    if writers and not shared:
        yield Remark("one file", "right", "no file is written by two ranks")


def _by_place(ranks: Sequence[ScriptFacts], which: str) -> dict[tuple[str, str], dict[int, PlacedFile]]:
    found: dict[tuple[str, str], dict[int, PlacedFile]] = {}
    for facts in ranks:
        for placed in getattr(facts, which):
            found.setdefault((facts.host, placed.path), {})[facts.rank] = placed
    return found


def _loads(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    for (_, path), places in _by_place(ranks, "loaded").items():
        astray = [rank for rank, one in places.items() if set(one.devices) - {one.own_device}]
        if astray and not differs(tuple(one.devices) for one in places.values()):
            one = places[astray[0]]
            text = f"all ranks load to GPU {one.devices[0]}, whose memory it fills"
            fix = "torch.load(path, map_location=device), or map_location='cpu'"
            yield Remark("one GPU", "costs", text, one.site, fix, f"{format_ranks(astray)}: {path}")


def _unused(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    for replicas in zip(*(facts.replicas for facts in ranks), strict=False):
        one = replicas[0]
        if one.find_unused and min(r.looked for r in replicas) >= LEAST_LOOKS and not max(r.unused for r in replicas):
            text = "find_unused_parameters=True is not needed: each step walks the whole graph for nothing"
            fix = "TrainingArguments(ddp_find_unused_parameters=False)" if one.by_library else "leave it out"
            seen = f"every parameter was used in {one.looked} forwards on all ranks"
            yield Remark("unused parameters", "note" if one.by_library else "costs", text, one.site, fix, seen)


def _threads(facts: ScriptFacts) -> Iterator[Remark]:
    share = max(1, facts.cores // max(1, facts.local_world))
    if facts.threads > share:
        call = "session(threads={})" if facts.session else "torch.set_num_threads({})"
        fix = call.format(share) if facts.threads_site else f"--threads-per-rank {share}"
        text = "there are more threads than cores"
        seen = f"{facts.local_world} ranks x {facts.threads} threads on {facts.cores} cores"
        yield Remark("threads", "costs", text, facts.threads_site, fix, seen)
    elif facts.threads:
        yield Remark("threads", "right", f"{facts.local_world} ranks x {facts.threads} threads, {facts.cores} cores")


def _trained(facts: ScriptFacts) -> SeenLoader | None:
    """The first loader that ranks train on together."""
    return next((one for one in facts.loaders if one.training and not one.private), None)


def _rate(facts: ScriptFacts) -> Iterator[Remark]:
    loader, steps = _trained(facts), joint_steps(facts)
    if loader is None or not steps or not loader.training[0].sizes or facts.world // facts.split < 2:
        return
    batch = loader.training[0].sizes[0]
    rate = max(step.learning_rate for step in steps)  # it may begin with 0
    apart = facts.world // facts.split  # ranks that have batches of their own
    text = f"{apart} ranks x batch {batch} = {apart * batch} samples, learning rate {rate:g}"
    fix = "decide whether the rate is to grow with the world: lr * world_size (SGD), lr * world_size ** 0.5 (Adam)"
    yield Remark("learning rate", "note", text, loader.made, fix)


def _schedule(facts: ScriptFacts) -> Iterator[Remark]:
    """One that goes a step with each batch, and is exactly as long as the training of one process would be."""
    loader = _trained(facts)
    if loader is None or not facts.ended or loader.batch_size < 1 or loader.samples < 1 or loader.batches < 1:
        return
    epochs, steps = len(loader.training), len(joint_steps(facts))
    alone = {epochs * -(-loader.samples // loader.batch_size), epochs * (loader.samples // loader.batch_size)}
    for one in facts.schedules:
        own = one.steps == steps == sum(len(seen.sizes) for seen in loader.passes)
        if own and one.length in alone and min(alone) > LONGER * epochs * loader.batches:
            text = "the learning rate's schedule is as long as the training of one process: it ends before its end"
            fix = "epochs * len(loader), which counts the batches of one rank"
            seen = f"made at {one.made} with {one.length} steps; {epochs} epochs have {epochs * loader.batches}"
            yield Remark("schedule", "wrong", text, one.site, fix, seen)


def gradient_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    """All of them."""
    found = [*_of_optimizers(ranks)]
    drifted = any(one.level == "wrong" for one in found)
    past = next((step for facts in ranks for step in _past(facts)), None)
    if past is not None and drifted:  # between steps through DDP
        site = next((one.past_site for facts in ranks for one in facts.replicas if one.past_site), past.site)
        found = [replace(one, **PAST, site=site) if one.rule == "replicas" else one for one in found]
    elif past is not None:
        alone = [facts.rank for facts in ranks if any(_past(facts))]
        text = f"{format_ranks(alone)} {'trains' if len(alone) == 1 else 'train'} on alone, past DDP"
        fix = "ddp(x), not ddp.module(x), if this is not meant"
        found.append(Remark("past DDP", "note", text, past.backward_site, fix, "after steps through DDP"))
    yield from found


def _past(facts: ScriptFacts) -> Iterator[SeenStep]:
    """Those past DDP; not an optimizer's first, if its next is none: then it shares a forward with another's step."""
    of: defaultdict[int, list[SeenStep]] = defaultdict(list)
    for step in facts.steps:
        of[step.optimizer].append(step)
    for steps in of.values():
        shares = steps[0].past and len(steps) > 1 and not steps[1].past
        yield from (step for step in steps[shares:] if step.past)


def _of_optimizers(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    told = set[str]()
    for of_ranks in zip(*map(steps_of, ranks), strict=False):
        rows, own = _without_own(_met(of_ranks), replicas=bool(ranks[0].replicas))
        if own is not None:
            yield own
        if not rows or differs(step.shapes for step in rows[0]) or not rows[0][0].gradients:
            continue
        apart = [row for row in rows if differs(step.gradients for step in row)]
        start = differs(step.parameters for step in rows[0])
        first, looked = rows[0][0], [row for row in rows if all(step.local for step in row)]
        if apart:
            when = f"at {len(apart)} of {len(rows)} steps"
            finding = _brought_together(rows) or _why_apart(ranks[0], apart[0][0], when, start=start)
            if finding.words not in told:
                yield finding
            told.add(finding.words)
        elif len(looked) >= LEAST_LOOKS and all(map(_is_sum, looked)):
            text = "gradients are summed over ranks, not averaged: steps are larger by the number of ranks"
            fix = "parameter.grad /= dist.get_world_size(), after the sum; or DistributedDataParallel(model)"
            yield Remark("gradients", "wrong", text, first.site, fix, f"at {len(looked)} of {len(rows)} steps")
        else:
            yield Remark("gradients", "right", f"gradients are equal on all ranks at {len(rows)} steps", first.site)
            yield from _clips(rows)
            if not start and (drift := _drift(ranks[0], rows)) is not None:
                yield drift
        if start and (ranks[0].replicas or not apart):
            site = ranks[0].replicas[0].site if ranks[0].replicas else first.site
            fix = "DistributedDataParallel(model), which sends rank 0's weights; or one torch.manual_seed for all"
            text = "ranks start from different weights"
            yield Remark("different start", "wrong", text, site, fix, "they differ before the first step")
        elif not start:
            yield Remark("different start", "right", "all ranks start from the same weights", first.site)


def _without_own(rows: list[list[SeenStep]], *, replicas: bool) -> tuple[list[list[SeenStep]], Remark | None]:
    """The same without parameters that each rank has for itself: parts of a classifier, of a table, experts.

    They belong to no replica, their gradients differ, some of them differ from the start, and ranks exchange tensors
    between forward and backward. Where nothing else is trained, and no DDP is there, the model is not wrapped.
    """
    looked = [row for row in rows if all(step.each for step in row)]
    if not looked or differs(len(step.each) for row in looked for step in row):
        return rows, None
    outside = set[int].intersection(*(set(step.outside) for row in looked for step in row))
    own = {n for n in outside if any(differs(step.each[n] for step in row) for row in looked)}
    first, exchanged = looked[0], sum(all(step.exchanged for step in row) for row in looked)
    kept = [n for n in range(len(first[0].each)) if n not in own]
    if not any(differs(step.each_before[n] for step in first) for n in own):
        return rows, None
    if 2 * exchanged <= len(looked) or not (kept or replicas):
        return rows, None
    text = f"{len(own)} parameters are each rank's own: they differ from the start, and ranks exchange what they give"
    fix = "DistributedDataParallel(model) with them in it, if they are meant to be equal"
    remark = Remark("own parameters", "note", text, first[0].site, fix, f"in {exchanged} of {len(looked)} steps")
    return [[_of_parameters(step, kept) for step in row] for row in looked], remark


def _of_parameters(step: SeenStep, kept: Sequence[int]) -> SeenStep:
    gradients, before, after = (
        ",".join(digests[n] for n in kept if n < len(digests))
        for digests in (step.each, step.each_before, step.each_after)
    )
    return replace(step, gradients=gradients, parameters=before, after=after, shapes="", strangers=0)


def _met(of_ranks: Sequence[Sequence[SeenStep]]) -> list[list[SeenStep]]:
    """The steps that ranks took together: the first, second, ... of each epoch; with Join some ranks have more."""
    found: defaultdict[tuple[int, int], list[SeenStep]] = defaultdict(list)
    for steps in of_ranks:
        count: Counter[int] = Counter()
        for step in steps:
            found[step.epoch, count[step.epoch]].append(step)
            count[step.epoch] += 1
    return [row for row in found.values() if len(row) == len(of_ranks)]


def _is_sum(row: Sequence[SeenStep]) -> bool:
    """Whether what is applied is the sum of what the ranks had, and not their mean."""
    whole, applied = sum(step.local for step in row), row[0].applied
    size = sum(abs(step.local) for step in row)
    return abs(applied - whole) < CLOSE * size and abs(whole) > 10 * CLOSE * size


def by_means(ranks: Sequence[ScriptFacts]) -> bool:
    """Whether gradients are averaged with one weight for each rank: by DDP, or by the script itself."""
    rows = [row for of_ranks in zip(*map(steps_of, ranks), strict=False) for row in _met(of_ranks)]
    own = [row for row in rows if all(step.local for step in row)]
    return any(facts.replicas for facts in ranks) or any(map(_is_mean, own))


def _is_mean(row: Sequence[SeenStep]) -> bool:
    mean, size = sum(step.local for step in row) / len(row), sum(abs(step.local) for step in row)
    return abs(row[0].applied - mean) < CLOSE * size


def _brought_together(rows: Sequence[Sequence[SeenStep]]) -> Remark | None:
    """Weights that are equal again, after steps of which each rank took its own, are so on purpose: local SGD."""
    apart = [differs(step.gradients for step in row) for row in rows]
    before = rows[apart.index(True)][0].parameters
    equal = [
        row[0].parameters not in ("", before) and not differs(step.parameters for step in row)
        for row, later in zip(rows[1:], accumulate(apart, or_), strict=False)
        if later
    ]
    if not any(equal):
        return None
    text = "ranks step with gradients of their own, and their weights are brought together later (local SGD)"
    fix = "DistributedDataParallel(model), if this is not meant"
    seen = f"gradients differ at {sum(apart)} of {len(rows)} steps; weights are equal again before {sum(equal)} of them"
    return Remark("gradients", "note", text, rows[0][0].site, fix, seen)


def _clips(rows: Sequence[Sequence[SeenStep]]) -> Iterator[Remark]:
    """Where gradients are equal at the step, and were not when they were clipped, they were averaged after that."""
    for row in rows:
        norms = [step.norm for step in row]
        if max(norms) - min(norms) > CLOSE * max(norms) and any(step.norm > step.limit > 0 for step in row):
            text = "gradients are clipped before they are averaged: each rank by a norm of its own"
            fix = "clip_grad_norm_ after the gradients are averaged, in front of optimizer.step()"
            seen = f"clipped to {row[0].limit:g}; norms by rank {', '.join(f'{norm:.3g}' for norm in norms)}"
            yield Remark("clipping", "wrong", text, row[0].clip_site, fix, seen)
            return


def _drift(facts: ScriptFacts, rows: Sequence[Sequence[SeenStep]]) -> Remark | None:
    """Where weights of replicas that were equal become different, although all gradients are equal."""
    before: Sequence[SeenStep] = ()
    for number, row in enumerate(rows, 1):
        if differs(step.parameters for step in row):
            changed = [rank for rank, (a, b) in enumerate(zip(before, row, strict=False)) if a.after != b.parameters]
            text = "weights are changed between two steps, and differ between ranks then"
            fix = (
                "change weights on all ranks alike: without a condition on the rank, and without its own random numbers"
            )
            seen = f"{format_ranks(changed)}: between steps {number - 1} and {number}"
            return Remark("replicas", "wrong", text, row[0].site, fix, seen)
        if differs(step.after for step in row):
            return _unequal_step(facts, row, number)
        before = row
    return None


def _unequal_step(facts: ScriptFacts, row: Sequence[SeenStep], number: int) -> Remark:
    site, seen = row[0].site, f"at step {number}"
    plateau = next((one for one in facts.schedules if one.name == "ReduceLROnPlateau"), None)
    if differs(step.learning_rate for step in row):
        text = "ranks step with different learning rates: their weights drift apart"
        fix = "one learning rate on all ranks"
        seen += ": " + ", ".join(f"{step.learning_rate:g} on rank {rank}" for rank, step in enumerate(row))
        if plateau is not None:
            site = plateau.site
            fix = "give scheduler.step the mean over all ranks: dist.all_reduce(loss), then loss / world_size"
    elif differs(step.settings for step in row):
        text = "ranks step with different optimizer settings: their weights drift apart"
        fix = "one weight decay, momentum, ... on all ranks"
    else:
        text = "the optimizer's step gives different weights on ranks with equal gradients"
        fix = "one optimizer on all ranks, whose state is changed on no rank alone"
    return Remark("replicas", "wrong", text, site, fix, seen)


def _why_apart(facts: ScriptFacts, step: SeenStep, when: str, *, start: bool) -> Remark:
    replica = facts.replicas[0] if facts.replicas else None
    if replica is None:
        apart = ", and ranks start from different weights" if start else ""
        text = f"gradients are never averaged over ranks: no model is wrapped{apart}"
        fix, site = "model = DistributedDataParallel(model), before the optimizer is made", step.site
    elif not step.forwards and replica.past_site:
        text, fix, site = PAST["words"], PAST["type_instead"], replica.past_site
    elif step.synced < step.forwards and replica.no_sync_site:
        text = "gradients are not averaged: the last micro-batch before a step is within no_sync(), too"
        fix, site = "leave no_sync() for the last micro-batch of each window", replica.no_sync_site
    elif not step.forwards:
        text = "gradients are not averaged: no DDP model has gone forward since the last step"
        fix, site = "call the DDP model itself: ddp(x), not a method of ddp.module", step.backward_site
    elif step.strangers:
        text = f"gradients of {step.strangers} parameters are not averaged: DDP was made without them"
        fix, site = "put all layers into the model first, then DistributedDataParallel(model)", step.site
    else:
        text = "gradients differ between ranks when the optimizer steps"
        fix = "give the optimizer only parameters of the DDP model, and change no gradient on one rank alone"
        site = step.site
    return Remark("gradients", "wrong", text, site, fix, f"they differ {when}")


def steps_of(facts: ScriptFacts) -> list[list[SeenStep]]:
    """What ranks take together, by optimizer: those of replicas first, then those whose steps mostly meet others.

    Where there are such, others are the rank's own; so is a step past DDP, after some through it.
    """
    found: defaultdict[int, list[SeenStep]] = defaultdict(list)
    for step in facts.steps:
        if not step.past:
            found[step.optimizer].append(step)
    steps = [found[number] for number in sorted(found)]
    own = [one for one in steps if any(step.own for step in one)]
    met = [
        one for one in steps if one not in own and len(one) >= LEAST_STEPS and 2 * sum(s.met for s in one) > len(one)
    ]
    return [*own, *met] or steps


def joint_steps(facts: ScriptFacts) -> list[SeenStep]:
    """The same, of all optimizers."""
    return [step for steps in steps_of(facts) for step in steps]
