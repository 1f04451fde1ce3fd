"""The pitfalls of scores and of means, as pure rules: what all ranks saw -> what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from paceline.guard.sentences import named
from paceline.protocol.facts import EPOCHS, Pass, ScriptFacts, SeenStep
from paceline.verify.finding import Loaders, Remark, differs, same_data, shared_part
from paceline.verify.gradient_rules import steps_of

COSTLY, COSTLY_SECONDS = 0.2, 1.0  # of an epoch
LITTLE = 0.05  # a difference in what losses and scores are divided by
LEAST_RATES, WHOLE_ENOUGH = 3, 1e-3  # so many fractions are not fractions by chance
LEAST_STEPS = 8  # before it is said of most that they were divided wrongly
SHARE = "Subset(data, range(rank, len(data), world_size))"


def padding_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    """Where a loss or a score counts padding, or leaves it out on each rank for itself."""
    found = [*_padding(ranks)]
    yield from found or _own_counts(ranks)
    yield from _metrics(ranks[0])


def evaluation_findings(ranks: Sequence[ScriptFacts], loaders: Loaders) -> Iterator[Remark]:
    """Of one loader that nobody trains on."""
    one = next(iter(loaders.values()))
    looked = {rank: loader.passes[:EPOCHS] for rank, loader in loaders.items() if loader.passes}
    if len(looked) == 1 and len(ranks) > 1:
        training = [loader for loader in ranks[0].loaders if loader.training and loader.training[0].seconds]
        alone = _seconds(next(iter(looked.values()))[0], one.batches)
        epoch = sum(_seconds(loader.training[0], loader.batches) for loader in training)
        words = f"{named(looked)} evaluates alone"
        if training and alone >= COSTLY_SECONDS and alone >= COSTLY * epoch:
            seen = f"about {alone:.1f} s beside {epoch:.1f} s of an epoch, in which the others wait"
            do = f"DataLoader({SHARE}, ...) on all ranks, and dist.all_reduce of the counts"
            yield Remark("evaluation alone", "costs", words + ", and the others wait", one.site, do, seen)
        elif training:
            yield Remark("evaluation alone", "right", words + ", which costs little", one.site)
    if len(looked) < 2 or one.samples < 0 or not one.probes:
        return
    same = same_data(loaders)
    drawn = sum(of_rank[0].drawn for of_rank in looked.values())
    if same and shared_part([of_rank[0] for of_rank in looked.values()]) > 1 / 2:
        yield Remark("evaluation shared", "note", "all ranks evaluate the whole of the data, each for itself", one.site)
    elif not any(seen.summed for of_rank in looked.values() for seen in of_rank):
        printing = [rank for rank, of_rank in looked.items() if any(seen.printed for seen in of_rank)]
        if len(printing) == 1:
            words = f"{named(printing)} tells a score of its own share only"
            do = "dist.all_reduce(counts) before it is divided and printed"
            seen = "each rank evaluates a share, and no collective brings the results together"
            yield Remark("score of a share", "wrong", words, one.site, do, seen)
    elif same and drawn > one.samples and not any(facts.gathers_for_metrics for facts in ranks):
        words = "the score counts samples twice: the sampler pads the shares to one length"
        do = f"DataLoader({SHARE}, ...): shares without padding"
        seen = f"ranks evaluate {drawn} samples of {one.samples}"
        yield Remark("padded score", "wrong", words, one.made, do, seen)
    elif _rates_of_shares([*looked.values()]):
        words = "the score is a mean over unequal shares: each rank's counts as much as another's"
        do = "dist.all_reduce the sums and the counts, and divide then"
        told = ", ".join(f"rank {rank}: {of_rank[0].drawn}" for rank, of_rank in looked.items())
        site = next(seen.reduced_site for of_rank in looked.values() for seen in of_rank if seen.reduced)
        yield Remark("mean of means", "wrong", words, site, do, f"shares of {told} samples were summed as rates")
    else:
        yield Remark("padded score", "right", "evaluation counts each sample once", one.made)


def _rates_of_shares(of_ranks: Sequence[Sequence[Pass]]) -> bool:
    """Whether ranks with unequal shares have summed parts of their own share (7/32, 12/45), and no counts."""
    drawn = [passes[0].drawn for passes in of_ranks]
    if max(drawn) - min(drawn) <= LITTLE * max(drawn):
        return False
    rates, beyond = 0, False
    for passes in zip(*of_ranks, strict=False):
        counts = [sum(seen.sizes) for seen in passes]
        columns = [*zip(*(seen.reduced for seen in passes), strict=False)]
        if tuple(counts) in columns:
            return False  # weighed
        for column in columns:
            if all(map(_is_part, column, counts)):
                rates += sum(not _is_part(value, 1) for value in column)
                beyond = beyond or not all(_is_part(value, sum(counts)) for value in column)  # or weighed before
    return beyond and rates >= LEAST_RATES


def _is_part(value: float, count: int) -> bool:
    """Whether it is a fraction with this denominator."""
    return math.isfinite(value) and abs(value * count - round(value * count)) < WHOLE_ENOUGH


def _seconds(seen: Pass, batches: int) -> float:
    """How long the whole would take."""
    return seen.seconds * max(1.0, batches / max(1, len(seen.sizes)))


def _padding(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    for loss in ranks[0].losses:
        others = [one for facts in ranks for one in facts.losses if one.site == loss.site]
        if len(others) < len(ranks) or not any(c < s for o in others for c, s in zip(o.counts, o.sizes, strict=True)):
            continue
        counts = [*zip(*(one.counts for one in others), strict=False)]
        worst = max(counts, key=lambda many: (max(many) - min(many)) / max(1, *many), default=())
        if worst and max(worst) - min(worst) > LITTLE * max(worst):
            words = "the loss is a mean over unequal counts: padding is left out of it on each rank for itself"
            do = 'reduction="sum", times world_size, divided by the dist.all_reduce of (target != ignore_index).sum()'
            told = ", ".join(f"{facts.rank}: {count}" for facts, count in zip(ranks, worst, strict=True))
            yield Remark("mean over padding", "wrong", words, loss.site, do, f"elements that count, by rank {told}")


def _own_counts(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    """Losses that each rank divides by a count of its own: of the words that a mask leaves, say."""
    rows = [*zip(*(next(iter(steps_of(facts)), []) for facts in ranks), strict=False)]
    counts = [*filter(None, map(_divided, rows))]
    if len(rows) >= LEAST_STEPS and len(counts) > len(rows) / 2:
        words = "the loss is a mean over unequal counts: each rank divides it by one of its own"
        do = "the sum, times world_size, divided by the dist.all_reduce of that count"
        worst = max(counts, key=lambda many: max(many) / min(many))
        told = ", ".join(f"{facts.rank}: {count:g}" for facts, count in zip(ranks, worst, strict=True))
        seen = f"at {len(counts)} of {len(rows)} steps; the most, by rank {told}"
        yield Remark("mean over padding", "wrong", words, rows[0][0].backward_site, do, seen)


def _divided(row: Sequence[SeenStep]) -> list[float]:
    """By which whole numbers ranks have divided their losses last, if these differ, and nothing makes up for it."""
    whole = [abs(math.prod(step.factors)) for step in row]
    found = [next((1 / f for f in step.factors if _is_count(f)), 0.0) for step in row]
    return found if all(found) and max(whole) - min(whole) > LITTLE * max(whole) and differs(found) else []


def _is_count(factor: float) -> bool:
    return 0 < factor <= 1 / 2 and abs(1 / factor - round(1 / factor)) < WHOLE_ENOUGH


def _metrics(facts: ScriptFacts) -> Iterator[Remark]:
    for one in facts.metrics:
        if not one.name:
            yield Remark("padding in a score", "right", "scores are the same with more padding", one.site)
            continue
        words = f"the score counts padding: {one.name} depends on how long the longest sample is"
        do = "kept = labels != -100; and score predictions[kept], labels[kept] only"
        seen = f"it is {one.value:.4g}, and {one.padded:.4g} of the same samples with one more column of padding"
        yield Remark("padding in a score", "wrong", words, one.site, do, seen)
