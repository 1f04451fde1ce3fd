"""What is wrong with gradients and first weights, as pure rules: what all ranks saw at each step -> what it is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import or_

from msgspec.structs import replace

from paceline.guard.sentences import named
from paceline.protocol.facts import ScriptFacts, SeenStep
from paceline.verify.finding import Remark, differs

CLOSE = 1e-3  # sums of floats in another order
LEAST_STEPS = 4  # of an optimizer, before most of them say anything
PAST = {
    "rule": "gradients",
    "words": "gradients are not averaged: the model is called past DDP",
    "type_instead": "call the DDP model itself: ddp(x), not ddp.module(x), or a method of it",
}
LEAST_LOOKS = 8  # steps, before it is said of all that they were summed


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
        words = f"{named(alone)} {'trains' if len(alone) == 1 else 'train'} on alone, past DDP"
        do = "ddp(x), not ddp.module(x), if this is not meant"
        found.append(Remark("past DDP", "note", words, past.backward_site, do, "after steps through DDP"))
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
            words = "gradients are summed over ranks, not averaged: steps are larger by the number of ranks"
            do = "parameter.grad /= dist.get_world_size(), after the sum; or DistributedDataParallel(model)"
            yield Remark("gradients", "wrong", words, first.site, do, f"at {len(looked)} of {len(rows)} steps")
        else:
            yield Remark("gradients", "right", f"gradients are equal on all ranks at {len(rows)} steps", first.site)
            yield from _clips(rows)
            if not start and (drift := _drift(ranks[0], rows)) is not None:
                yield drift
        if start and (ranks[0].replicas or not apart):
            site = ranks[0].replicas[0].site if ranks[0].replicas else first.site
            do = "DistributedDataParallel(model), which sends rank 0's weights; or one torch.manual_seed for all"
            words = "ranks start from different weights"
            yield Remark("different start", "wrong", words, site, do, "they differ before the first step")
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
    words = f"{len(own)} parameters are each rank's own: they differ from the start, and ranks exchange what they give"
    do = "DistributedDataParallel(model) with them in it, if they are meant to be equal"
    remark = Remark("own parameters", "note", words, first[0].site, do, f"in {exchanged} of {len(looked)} steps")
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
    words = "ranks step with gradients of their own, and their weights are brought together later (local SGD)"
    do = "DistributedDataParallel(model), if this is not meant"
    seen = f"gradients differ at {sum(apart)} of {len(rows)} steps; weights are equal again before {sum(equal)} of them"
    return Remark("gradients", "note", words, rows[0][0].site, do, seen)


def _clips(rows: Sequence[Sequence[SeenStep]]) -> Iterator[Remark]:
    """Where gradients are equal at the step, and were not when they were clipped, they were averaged after that."""
    for row in rows:
        norms = [step.norm for step in row]
        if max(norms) - min(norms) > CLOSE * max(norms) and any(step.norm > step.limit > 0 for step in row):
            words = "gradients are clipped before they are averaged: each rank by a norm of its own"
            do = "clip_grad_norm_ after the gradients are averaged, in front of optimizer.step()"
            seen = f"clipped to {row[0].limit:g}; norms by rank {', '.join(f'{norm:.3g}' for norm in norms)}"
            yield Remark("clipping", "wrong", words, row[0].clip_site, do, seen)
            return


def _drift(facts: ScriptFacts, rows: Sequence[Sequence[SeenStep]]) -> Remark | None:
    """Where weights of replicas that were equal become different, although all gradients are equal."""
    before: Sequence[SeenStep] = ()
    for number, row in enumerate(rows, 1):
        if differs(step.parameters for step in row):
            changed = [rank for rank, (a, b) in enumerate(zip(before, row, strict=False)) if a.after != b.parameters]
            words = "weights are changed between two steps, and differ between ranks then"
            do = (
                "change weights on all ranks alike: without a condition on the rank, and without its own random numbers"
            )
            seen = f"{named(changed)}: between steps {number - 1} and {number}"
            return Remark("replicas", "wrong", words, row[0].site, do, seen)
        if differs(step.after for step in row):
            return _unequal_step(facts, row, number)
        before = row
    return None


def _unequal_step(facts: ScriptFacts, row: Sequence[SeenStep], number: int) -> Remark:
    site, seen = row[0].site, f"at step {number}"
    plateau = next((one for one in facts.schedules if one.name == "ReduceLROnPlateau"), None)
    if differs(step.learning_rate for step in row):
        words = "ranks step with different learning rates: their weights drift apart"
        do = "one learning rate on all ranks"
        seen += ": " + ", ".join(f"{step.learning_rate:g} on rank {rank}" for rank, step in enumerate(row))
        if plateau is not None:
            site = plateau.site
            do = "give scheduler.step the mean over all ranks: dist.all_reduce(loss), then loss / world_size"
    elif differs(step.settings for step in row):
        words = "ranks step with different optimizer settings: their weights drift apart"
        do = "one weight decay, momentum, ... on all ranks"
    else:
        words = "the optimizer's step gives different weights on ranks with equal gradients"
        do = "one optimizer on all ranks, whose state is changed on no rank alone"
    return Remark("replicas", "wrong", words, site, do, seen)


def _why_apart(facts: ScriptFacts, step: SeenStep, when: str, *, start: bool) -> Remark:
    replica = facts.replicas[0] if facts.replicas else None
    if replica is None:
        apart = ", and ranks start from different weights" if start else ""
        words = f"gradients are never averaged over ranks: no model is wrapped{apart}"
        do, site = "model = DistributedDataParallel(model), before the optimizer is made", step.site
    elif not step.forwards and replica.past_site:
        words, do, site = PAST["words"], PAST["type_instead"], replica.past_site
    elif step.synced < step.forwards and replica.no_sync_site:
        words = "gradients are not averaged: the last micro-batch before a step is within no_sync(), too"
        do, site = "leave no_sync() for the last micro-batch of each window", replica.no_sync_site
    elif not step.forwards:
        words = "gradients are not averaged: no DDP model has gone forward since the last step"
        do, site = "call the DDP model itself: ddp(x), not a method of ddp.module", step.backward_site
    elif step.strangers:
        words = f"gradients of {step.strangers} parameters are not averaged: DDP was made without them"
        do, site = "put all layers into the model first, then DistributedDataParallel(model)", step.site
    else:
        words = "gradients differ between ranks when the optimizer steps"
        do = "give the optimizer only parameters of the DDP model, and change no gradient on one rank alone"
        site = step.site
    return Remark("gradients", "wrong", words, site, do, f"they differ {when}")


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
