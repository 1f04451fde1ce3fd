"""The pitfalls of data, scores and means: pure rules over the facts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from paceline.guard.sentences import format_ranks
from paceline.lab.check.findings import Loaders, Remark, differs, loaders_of, same_data, same_leaf, shared_part, unlike
from paceline.lab.check.step_rules import by_means, steps_of
from paceline.protocol.facts import EPOCHS, OWN_GENERATORS, Pass, ScriptFacts, SeenLoader, SeenStep

FEW, SHOWN = 8, 6  # samples: of fewer an order says nothing
MOST_SHARED = 0.1  # of a rank's samples that others have, too; what pads a last batch is less, or a batch
PLAIN_SAMPLERS = ("", "RandomSampler", "SequentialSampler")  # which choose nothing
WHAT_IS_DRAWN = {"WeightedRandomSampler": "weights, num_samples", "SubsetRandomSampler": "indices"}
REPEATED = 0.05  # a sampler that draws so many twice draws with replacement
COSTLY, COSTLY_SECONDS = 0.2, 1.0  # of an epoch
LITTLE = 0.05  # a difference in what losses and scores are divided by
LEAST_RATES, WHOLE_ENOUGH = 3, 1e-3  # so many fractions are not fractions by chance
LEAST_STEPS = 8  # before it is said of most that they were divided wrongly
SHARE = "Subset(data, range(rank, len(data), world_size))"


def data_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    """All of them. Of ranks that work on the same batches with parts of layers, the first counts."""
    if any(facts.split > 1 for facts in ranks):
        ranks = [facts for facts in ranks if facts.split_rank == 0]
        if len(ranks) < 2:
            return
    joined = any(replica.joined for facts in ranks for replica in facts.replicas)
    trained = False
    for loaders in loaders_of(ranks):
        if all(loader.private for loader in loaders.values()):
            continue
        if len(loaders) > 1 and all(loader.training for loader in loaders.values()):
            trained = True
            shares = [*_shares(loaders)]
            yield from shares
            if not any(one.level == "wrong" for one in shares):
                yield from _augmentation(ranks, loaders)
            yield from _order(loaders)
            yield from _shrinks(loaders)
            if not joined:
                yield from _lengths(loaders, means=by_means(ranks))
        elif not any(loader.training for loader in loaders.values()):
            yield from evaluation_findings(ranks, loaders)
    if not trained and not any(facts.loaders for facts in ranks):
        yield from _inputs(ranks)
    yield from padding_findings(ranks)


def _first(loaders: Loaders) -> dict[int, Pass]:
    return {rank: loader.training[0] for rank, loader in loaders.items()}


def _shares(loaders: Loaders) -> Iterator[Remark]:
    one, passes = next(iter(loaders.values())), _first(loaders)
    distributed = "istributed" in one.sampler
    deals = distributed or one.sampler.startswith("BatchSamplerShard")  # Accelerate's, and so the Trainer's
    fix = _share_of(one)
    if distributed:
        fix = "DistributedSampler(data) with its own num_replicas and rank, and one seed on all ranks"
    of_all = [seen.indices for seen in passes.values()]
    indexed = all(of_all) and all(loader.probes for loader in loaders.values())
    if not indexed:
        if all(len(seen.leaves) > 1 for seen in passes.values()) and same_leaf(p.leaves for p in passes.values()):
            fix = "let each rank read its own share: itertools.islice(samples, rank, None, world_size)"
            text = "all ranks train on the same batches"
            yield Remark("same batches", "wrong", text, one.made, fix, "their contents are equal, batch by batch")
        return
    if not same_data(loaders):
        told_apart = unlike(loader.probes for loader in loaders.values())
        if deals and told_apart and all(_draws_less(loaders[rank], seen) for rank, seen in passes.items()):
            fix = "the same data on all ranks, not shared out by hand; random_split(..., generator=) of one seed"
            text = f"{one.sampler} deals out data that differ between ranks"
            seen = "a sample with the same index is another one on each rank: some are seen twice, others never"
            yield Remark("same batches", "wrong", text, one.made, fix, seen)
        else:
            yield Remark("same batches", "right", "every rank has data of its own", one.made)
        return
    shared = shared_part([*passes.values()])
    repeats = max(1 - len(set(indices)) / len(indices) for indices in of_all)
    allowed = MOST_SHARED + len(loaders) * max(1, one.batch_size) / max(1, one.samples)
    drew = ", ".join(map(str, of_all[0][:SHOWN]))
    if not differs(map(tuple, of_all)) and len(of_all[0]) > 1:
        seen = f"{format_ranks(loaders)} drew samples {drew}, ... in epoch 1"
        yield Remark("same batches", "wrong", "all ranks train on the same batches", one.made, fix, seen)
    elif shared > allowed and repeats < REPEATED:
        text = "ranks do not share the samples among them: each draws from all of them"
        seen = f"a rank has {shared:.0%} of its samples in common with another one in epoch 1"
        yield Remark("same batches", "wrong", text, one.made, fix, seen)
    else:
        yield Remark("same batches", "right", "every rank has its own samples of the data", one.made)


def _draws_less(loader: SeenLoader, seen: Pass) -> bool:
    """Whether its sampler draws less than the data have; a script may leave its loop before."""
    return max(seen.drawn, loader.batches * loader.batch_size) < loader.samples


def _share_of(loader: SeenLoader) -> str:
    """What to type so that each rank gets a share of what the sampler draws.

    A DistributedSampler takes the place of the sampler, and so forgets weights, subsets, ...: only for plain ones.
    """
    if loader.sampler == "BatchSamplerShard" or (loader.sampler in PLAIN_SAMPLERS and not loader.batch_sampler):
        return "DataLoader(..., sampler=DistributedSampler(data)), without shuffle=True"
    argument, drawn = "batch_size, sampler", ["drawn = list(sampler)  # the same on all ranks: seeded by seed + epoch"]
    if loader.batch_sampler:
        argument = "batch_sampler"
    elif loader.sampler in WHAT_IS_DRAWN:
        drawn = ["generator = torch.Generator().manual_seed(seed + epoch)  # the same on all ranks"]
        drawn += [f"drawn = list({loader.sampler}({WHAT_IS_DRAWN[loader.sampler]}, generator=generator))"]
    drawn += ["drawn = drawn[: len(drawn) // world_size * world_size]  # as many for each rank"]
    return "\n".join(
        ["in front of each epoch", *drawn, f"loader = DataLoader(data, {argument}=drawn[rank::world_size])"]
    )


def _order(loaders: Loaders) -> Iterator[Remark]:
    one = next(iter(loaders.values()))
    first, second = [*one.training, Pass(), Pass()][:2]
    if min(len(first.indices), len(second.indices)) < FEW or one.shuffles is False:
        return
    if first.cut_off and not one.plain:
        return  # what it does after its last index, as to count its epochs, was not seen
    both = min(len(first.indices), len(second.indices))
    later = (seen.indices[:both] for seen in one.training[2:] if len(seen.indices) >= FEW)
    differ = first.indices[:both] != second.indices[:both]
    if differ or any(order != first.indices[: len(order)] for order in later):  # an epoch may be trained again
        yield Remark("same order", "right", "every epoch has an order of its own", one.site)
    elif first.indices != sorted(first.indices):
        seen = f"both epochs begin with samples {', '.join(map(str, first.indices[:SHOWN]))}"
        text = "every epoch has the same order"
        fix = "sampler.set_epoch(epoch), in front of this loop"
        yield Remark("same order", "wrong", text, one.site, fix, seen)


def _shrinks(loaders: Loaders) -> Iterator[Remark]:
    one, world = next(iter(loaders.values())), len(loaders)
    if one.divided:
        text = f"the batch of a rank shrinks with the world: {one.divided} is {one.batch_size} on {world} ranks"
        fix = (
            "nothing, if one global batch is meant; else a batch size of each rank's own, and a learning rate for both"
        )
        seen = f"{world * one.batch_size} samples a step; on {4 * world} ranks {one.batch_size / 4:g} on each of them"
        yield Remark("batch shrinks", "note", text, one.made, fix, seen)


def _augmentation(ranks: Sequence[ScriptFacts], loaders: Loaders) -> Iterator[Remark]:
    one = next(iter(loaders.values()))
    if one.batches < 0:
        return  # streams may draw alike on purpose, and take their share of what they drew
    used = set[str].intersection(*(set(loader.random) for loader in loaders.values()))
    same = sorted(name for name in used if not differs(loader.random[name] for loader in loaders.values()))
    if same:
        seeded = ranks[0].seeds.get(same[0].partition(",")[0], "")
        seed = "torch.manual_seed" if "torch" in same[0] else f"{same[0]}.seed"
        fix = f"{seed}(seed + rank), after the model is made"
        if same[0].startswith(OWN_GENERATORS):
            fix = "np.random.default_rng([seed, rank]), random.Random(seed + rank), torch.Generator().manual_seed(...)"
        text = "all ranks draw the same random numbers for their samples (the same augmentation)"
        seen = f"batches are made with {'; '.join(same)}, whose state is the same on {format_ranks(loaders)}"
        yield Remark("same augmentation", "wrong", text, seeded or one.site, fix, seen)
    elif used:
        yield Remark("same augmentation", "right", "every rank has random numbers of its own for its data", one.site)


def _lengths(loaders: Loaders, *, means: bool) -> Iterator[Remark]:
    one, passes = next(iter(loaders.values())), _first(loaders)
    told = ", ".join(f"rank {rank}: {loader.batches}" for rank, loader in loaders.items())
    if differs(loader.batches for loader in loaders.values()):
        text = "ranks have different numbers of batches: at the end some wait for others for ever"
        fix = f"DistributedSampler, which pads; or `with Join([model]):` around the loop at {one.site}"
        yield Remark("uneven steps", "wrong", text, one.made, fix, told)
        return
    sizes = [*zip(*(seen.sizes for seen in passes.values()), strict=False)]
    if any(seen.cut_off for seen in passes.values()):
        sizes = sizes[:-1]  # not all ranks have come to their real last batch
    odd = next((k for k, many in enumerate(sizes) if differs(many)), None)
    if odd is not None and means:
        text = "ranks average over unequal shares: DDP's mean of their means weighs samples unequally"
        fix = "DataLoader(..., drop_last=True), or loss.sum() * world_size / samples of all ranks"
        told = ", ".join(f"rank {rank}: {size}" for rank, size in zip(passes, sizes[odd], strict=True))
        yield Remark("unequal shares", "wrong", text, one.made, fix, f"samples in batch {odd + 1}: {told}")


def _inputs(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    of_ranks = [facts.replicas[0].inputs for facts in ranks if facts.replicas]
    if len(of_ranks) > 1 and all(len(one) > 1 for one in of_ranks) and same_leaf(of_ranks):
        site = ranks[0].steps[0].backward_site if ranks[0].steps else ranks[0].replicas[0].site
        fix = "give each rank a share of its own: x[rank::world_size]"
        text = "all ranks train on the same batches"
        yield Remark("same batches", "wrong", text, site, fix, "what goes into the model is equal on all ranks")
    elif len(of_ranks) > 1 and all(of_ranks):
        yield Remark("same batches", "right", "every rank has inputs of its own", ranks[0].replicas[0].site)


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
        text = f"{format_ranks(looked)} evaluates alone"
        if training and alone >= COSTLY_SECONDS and alone >= COSTLY * epoch:
            seen = f"about {alone:.1f} s beside {epoch:.1f} s of an epoch, in which the others wait"
            fix = f"DataLoader({SHARE}, ...) on all ranks, and dist.all_reduce of the counts"
            yield Remark("evaluation alone", "costs", text + ", and the others wait", one.site, fix, seen)
        elif training:
            yield Remark("evaluation alone", "right", text + ", which costs little", one.site)
    if len(looked) < 2 or one.samples < 0 or not one.probes:
        return
    same = same_data(loaders)
    drawn = sum(of_rank[0].drawn for of_rank in looked.values())
    if same and shared_part([of_rank[0] for of_rank in looked.values()]) > 1 / 2:
        yield Remark("evaluation shared", "note", "all ranks evaluate the whole of the data, each for itself", one.site)
    elif not any(seen.summed for of_rank in looked.values() for seen in of_rank):
        printing = [rank for rank, of_rank in looked.items() if any(seen.printed for seen in of_rank)]
        if len(printing) == 1:
            text = f"{format_ranks(printing)} tells a score of its own share only"
            fix = "dist.all_reduce(counts) before it is divided and printed"
            seen = "each rank evaluates a share, and no collective brings the results together"
            yield Remark("score of a share", "wrong", text, one.site, fix, seen)
    elif same and drawn > one.samples and not any(facts.gathers_for_metrics for facts in ranks):
        text = "the score counts samples twice: the sampler pads the shares to one length"
        fix = f"DataLoader({SHARE}, ...): shares without padding"
        seen = f"ranks evaluate {drawn} samples of {one.samples}"
        yield Remark("padded score", "wrong", text, one.made, fix, seen)
    elif _rates_of_shares([*looked.values()]):
        text = "the score is a mean over unequal shares: each rank's counts as much as another's"
        fix = "dist.all_reduce the sums and the counts, and divide then"
        told = ", ".join(f"rank {rank}: {of_rank[0].drawn}" for rank, of_rank in looked.items())
        site = next(seen.reduced_site for of_rank in looked.values() for seen in of_rank if seen.reduced)
        yield Remark("mean of means", "wrong", text, site, fix, f"shares of {told} samples were summed as rates")
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
            text = "the loss is a mean over unequal counts: padding is left out of it on each rank for itself"
            fix = 'reduction="sum", times world_size, divided by the dist.all_reduce of (target != ignore_index).sum()'
            told = ", ".join(f"{facts.rank}: {count}" for facts, count in zip(ranks, worst, strict=True))
            yield Remark("mean over padding", "wrong", text, loss.site, fix, f"elements that count, by rank {told}")


def _own_counts(ranks: Sequence[ScriptFacts]) -> Iterator[Remark]:
    """Losses that each rank divides by a count of its own: of the words that a mask leaves, say."""
    rows = [*zip(*(next(iter(steps_of(facts)), []) for facts in ranks), strict=False)]
    counts = [*filter(None, map(_divided, rows))]
    if len(rows) >= LEAST_STEPS and len(counts) > len(rows) / 2:
        text = "the loss is a mean over unequal counts: each rank divides it by one of its own"
        fix = "the sum, times world_size, divided by the dist.all_reduce of that count"
        worst = max(counts, key=lambda many: max(many) / min(many))
        told = ", ".join(f"{facts.rank}: {count:g}" for facts, count in zip(ranks, worst, strict=True))
        seen = f"at {len(counts)} of {len(rows)} steps; the most, by rank {told}"
        yield Remark("mean over padding", "wrong", text, rows[0][0].backward_site, fix, seen)


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
        text = f"the score counts padding: {one.name} depends on how long the longest sample is"
        fix = "kept = labels != -100; and score predictions[kept], labels[kept] only"
        seen = f"it is {one.value:.4g}, and {one.padded:.4g} of the same samples with one more column of padding"
        yield Remark("padding in a score", "wrong", text, one.site, fix, seen)
