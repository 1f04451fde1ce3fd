"""The pitfalls of windows, buffers, files and machines, as pure rules: what all ranks saw -> what is wrong."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from paceline.guard.sentences import named
from paceline.protocol.facts import EPOCHS, PlacedFile, ScriptFacts, SeenLoader, SeenStep
from paceline.verify.finding import Remark, differs
from paceline.verify.gradient_rules import gradient_findings, joint_steps, steps_of

LEAST_LOOKS = 8  # forwards without an unused parameter, before it is said that there are none
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
    words = "the script trains in a paceline.session(), which checks samples, gradients and weights while it trains"
    do = "paceline verify FILE.py:FUNCTION, which compares the loop with one process"
    yield Remark("session", "note", words, ranks[0].steps[0].site if ranks[0].steps else "", do)
    yield from (*_files(ranks), *_loads(ranks), *_threads(ranks[0]))


def _counts(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    joined = any(replica.joined for facts in ranks for replica in facts.replicas)
    counts = [len(next(iter(steps_of(facts)), [])) for facts in ranks]
    if all(facts.ended for facts in ranks) and differs(counts) and not joined and all(counts):
        told = ", ".join(f"rank {facts.rank}: {count}" for facts, count in zip(ranks, counts, strict=True))
        do = "the same number of batches on each rank: DistributedSampler, or `with Join([model]):`"
        yield Remark(
            "uneven steps", "wrong", "ranks take different numbers of steps", steps_of(ranks[0])[0][0].site, do, told
        )


def _lost(facts: ScriptFacts) -> Iterator[Remark]:
    """Gradients that are accumulated and cleared before the step: usual, not now and then, as after an overflow."""
    for steps in steps_of(facts):
        seen = [step for step in steps if step.loader < 0 or step.epoch <= EPOCHS]
        lost = [step for step in seen if step.lost and (step.loader >= 0 or _divides(step))]
        if len(lost) < 2 or len(lost) <= len(seen) / 2:
            continue
        count, of = Counter((step.lost, step.backwards) for step in lost).most_common(1)[0][0]
        words = f"the gradients of {count} of {of} micro-batches are cleared before the optimizer steps"
        do = "optimizer.zero_grad() only after optimizer.step(), not in front of each backward()"
        site = lost[0].clear_site or lost[0].backward_site
        yield Remark("lost gradients", "wrong", words, site, do, f"at {len(lost)} of {len(seen)} steps")
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
            words = f"the last window of an epoch has {step.backwards} micro-batches, and is divided by {window}"
            do = f"loss / min({window}, len(loader) - first micro-batch of the window)"
            seen = f"its gradient has {step.backwards}/{window} of its size"
            yield Remark("last window", "wrong", words, site, do, seen)
    for left in facts.dropped:
        if rest and left.epoch <= EPOCHS and left.backwards == rest and left.optimizer == 0 and clean:
            clean = False
            what = "are never used" if left.cleared else "go into the first step of the next epoch"
            words = f"the gradients of the last {left.backwards} micro-batches of an epoch {what}"
            do = f"step at the last one, too: if (i + 1) % {window} == 0 or i + 1 == len(loader)"
            yield Remark("last window", "wrong", words, steps[0].site, do, f"windows have {window} micro-batches")
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
            words = "each rank evaluates with batch norm statistics of its own"
            do = "evaluate through the DDP model, which sends rank 0's buffers; or SyncBatchNorm"
            yield Remark("batch norm", "wrong", words, site, do, "buffers differ between ranks when evaluation begins")
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
        do = "if dist.get_rank() == 0: in front of it; or the rank in the file's name"
        if ranks[0].session:
            do = "s.save(model, path) for weights; if s.rank == 0: in front of other files"
        yield Remark("one file", "wrong", "several ranks write one file", site, do, f"{named(of)}: {path}{more}")
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
            words = f"all ranks load to GPU {one.devices[0]}, whose memory it fills"
            do = "torch.load(path, map_location=device), or map_location='cpu'"
            yield Remark("one GPU", "costs", words, one.site, do, f"{named(astray)}: {path}")


def _unused(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    for replicas in zip(*(facts.replicas for facts in ranks), strict=False):
        one = replicas[0]
        if one.find_unused and min(r.looked for r in replicas) >= LEAST_LOOKS and not max(r.unused for r in replicas):
            words = "find_unused_parameters=True is not needed: each step walks the whole graph for nothing"
            do = "TrainingArguments(ddp_find_unused_parameters=False)" if one.by_library else "leave it out"
            seen = f"every parameter was used in {one.looked} forwards on all ranks"
            yield Remark("unused parameters", "note" if one.by_library else "costs", words, one.site, do, seen)


def _threads(facts: ScriptFacts) -> Iterator[Remark]:
    share = max(1, facts.cores // max(1, facts.local_world))
    if facts.threads > share:
        call = "session(threads={})" if facts.session else "torch.set_num_threads({})"
        do = call.format(share) if facts.threads_site else f"--threads-per-rank {share}"
        words = "there are more threads than cores"
        seen = f"{facts.local_world} ranks x {facts.threads} threads on {facts.cores} cores"
        yield Remark("threads", "costs", words, facts.threads_site, do, seen)
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
    words = f"{apart} ranks x batch {batch} = {apart * batch} samples, learning rate {rate:g}"
    do = "decide whether the rate is to grow with the world: lr * world_size (SGD), lr * world_size ** 0.5 (Adam)"
    yield Remark("learning rate", "note", words, loader.made, do)


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
            words = "the learning rate's schedule is as long as the training of one process: it ends before its end"
            do = "epochs * len(loader), which counts the batches of one rank"
            seen = f"made at {one.made} with {one.length} steps; {epochs} epochs have {epochs * loader.batches}"
            yield Remark("schedule", "wrong", words, one.site, do, seen)
