"""The rules about data, metrics and means: pure functions of the facts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from paceline.guard.sentences import format_ranks
from paceline.lab.check.findings import (
    Finding,
    Loaders,
    are_samples_mostly_equal,
    differs,
    do_all_tensors_differ,
    group_corresponding_loaders,
    is_same_dataset,
    largest_overlap_fraction,
)
from paceline.lab.check.step_rules import averages_gradients, synced_steps_by_optimizer
from paceline.protocol.facts import OWN_GENERATORS, RECORDED_EPOCHS, LoaderPass, OptimizerStep, ScriptFacts, SeenLoader

MIN_SAMPLES, MAX_LISTED = 8, 6  # samples that are compared to detect an order; samples in a message
MAX_OVERLAP = 0.1  # fraction of a rank's samples that other ranks may have; padding adds at most one batch to it
PLAIN_SAMPLERS = ("", "RandomSampler", "SequentialSampler")  # they draw each sample once
SAMPLER_ARGUMENTS = {"WeightedRandomSampler": "weights, num_samples", "SubsetRandomSampler": "indices"}
MIN_REPEATED = 0.05  # a sampler that draws this fraction of its samples twice draws with replacement
MIN_COST, MIN_COST_SECONDS = 0.2, 1.0  # of an evaluation on one rank: a fraction of an epoch; seconds
TOLERANCE = 0.05  # relative difference between ranks of the counts that losses and metrics are divided by
MIN_RATES, ROUNDING = 3, 1e-3  # this many fractions are not fractions by chance
MIN_STEPS = 8  # below it the rules about most steps do not apply
RANK_SUBSET_CODE = "Subset(data, range(rank, len(data), world_size))"


def data_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    """All findings about data. Among ranks that split layers and use the same batches, only the first counts."""
    if any(facts.split > 1 for facts in ranks):
        ranks = [facts for facts in ranks if facts.split_rank == 0]
        if len(ranks) < 2:
            return
    uses_join = any(replica.joined for facts in ranks for replica in facts.replicas)
    has_training = False
    for loaders in group_corresponding_loaders(ranks):
        if all(loader.local_only for loader in loaders.values()):
            continue
        if len(loaders) > 1 and all(loader.training_passes for loader in loaders.values()):
            has_training = True
            sharding = [*_sharding_findings(loaders)]
            yield from sharding
            if not any(finding.level == "wrong" for finding in sharding):
                yield from _augmentation_findings(ranks, loaders)
            yield from _order_findings(loaders)
            yield from _batch_size_findings(loaders)
            if not uses_join:
                yield from _length_findings(loaders, means=averages_gradients(ranks))
        elif not any(loader.training_passes for loader in loaders.values()):
            yield from evaluation_findings(ranks, loaders)
    if not has_training and not any(facts.loaders for facts in ranks):
        yield from _input_findings(ranks)
    yield from [*_masked_loss_findings(ranks)] or _local_count_findings(ranks)
    yield from _padded_metric_findings(ranks[0])


def _first_epochs(loaders: Loaders) -> dict[int, LoaderPass]:
    return {rank: loader.training_passes[0] for rank, loader in loaders.items()}


def _sharding_findings(loaders: Loaders) -> Iterator[Finding]:
    loader, passes = next(iter(loaders.values())), _first_epochs(loaders)
    distributed = "istributed" in loader.sampler
    splits = distributed or loader.sampler.startswith("BatchSamplerShard")  # Accelerate's, also used by the Trainer
    fix = _sharding_fix(loader)
    if distributed:
        fix = "DistributedSampler(data) with the default num_replicas and rank, and the same seed on all ranks"
    index_lists = [p.indices for p in passes.values()]
    indexed = all(index_lists) and all(loader.probes for loader in loaders.values())
    text, evidence = "all ranks train on the same batches", "the contents of the batches are equal"
    if not indexed:
        if all(len(p.leaves) > 1 for p in passes.values()) and are_samples_mostly_equal(
            p.leaves for p in passes.values()
        ):
            fix = "read a different part on each rank: itertools.islice(samples, rank, None, world_size)"
            yield Finding("same batches", "wrong", text, loader.constructed_at, fix, evidence)
        return
    if not is_same_dataset(loaders):
        differ = do_all_tensors_differ(loader.probes for loader in loaders.values())
        draws_parts = all(  # even if the script leaves its loop early
            max(p.drawn, loaders[rank].batches * loaders[rank].batch_size) < loaders[rank].samples
            for rank, p in passes.items()
        )
        if splits and differ and draws_parts:
            fix = "pass the whole data on all ranks, without splitting them first; random_split(..., generator=) with "
            fix += "the same seed on all ranks"
            text = f"{loader.sampler} splits data that already differ between ranks"
            evidence = "an index means a different sample on each rank: some samples are used twice, others never"
            yield Finding("same batches", "wrong", text, loader.constructed_at, fix, evidence)
        else:
            yield Finding("same batches", "right", "each rank has different data", loader.constructed_at)
        return
    common = largest_overlap_fraction([*passes.values()])
    repeats = max(1 - len(set(indices)) / len(indices) for indices in index_lists)
    allowed = MAX_OVERLAP + len(loaders) * max(1, loader.batch_size) / max(1, loader.samples)
    first_samples = ", ".join(map(str, index_lists[0][:MAX_LISTED]))
    if not differs(map(tuple, index_lists)) and len(index_lists[0]) > 1:
        evidence = f"{format_ranks(loaders)} drew samples {first_samples}, ... in epoch 1"
        yield Finding("same batches", "wrong", text, loader.constructed_at, fix, evidence)
    elif common > allowed and repeats < MIN_REPEATED:
        text = "the samples are not split between ranks: each rank draws from all samples"
        evidence = f"in epoch 1, {common:.0%} of a rank's samples are also samples of a different rank"
        yield Finding("same batches", "wrong", text, loader.constructed_at, fix, evidence)
    else:
        yield Finding("same batches", "right", "each rank has different samples of the data", loader.constructed_at)


def _sharding_fix(loader: SeenLoader) -> str:
    """The code that gives each rank a part of the indices that the sampler draws.

    A DistributedSampler replaces only plain samplers, because it ignores the weights, subsets, ... of other samplers.
    """
    if loader.sampler == "BatchSamplerShard" or (loader.sampler in PLAIN_SAMPLERS and not loader.batch_sampler):
        return "DataLoader(..., sampler=DistributedSampler(data)), without shuffle=True"
    argument, lines = "batch_size, sampler", ["drawn = list(sampler)  # the same on all ranks: seeded by seed + epoch"]
    if loader.batch_sampler:
        argument = "batch_sampler"
    elif loader.sampler in SAMPLER_ARGUMENTS:
        lines = ["generator = torch.Generator().manual_seed(seed + epoch)  # the same on all ranks"]
        lines += [f"drawn = list({loader.sampler}({SAMPLER_ARGUMENTS[loader.sampler]}, generator=generator))"]
    lines += ["drawn = drawn[: len(drawn) // world_size * world_size]  # the same number on each rank"]
    return "\n".join(["before each epoch", *lines, f"loader = DataLoader(data, {argument}=drawn[rank::world_size])"])


def _order_findings(loaders: Loaders) -> Iterator[Finding]:
    loader = next(iter(loaders.values()))
    first, second = [*loader.training_passes, LoaderPass(), LoaderPass()][:2]
    length = min(len(first.indices), len(second.indices))
    if length < MIN_SAMPLES or loader.shuffles is False:
        return
    if first.cut_off and not loader.plain:
        return  # the sampler may count its epochs after its last index, which was not drawn
    later_orders = (p.indices[:length] for p in loader.training_passes[2:] if len(p.indices) >= MIN_SAMPLES)
    differ = first.indices[:length] != second.indices[:length]
    if differ or any(order != first.indices[: len(order)] for order in later_orders):  # the script may repeat an epoch
        yield Finding("same order", "right", "each epoch has a different order", loader.site)
    elif first.indices != sorted(first.indices):
        evidence = f"both epochs begin with samples {', '.join(map(str, first.indices[:MAX_LISTED]))}"
        fix = "sampler.set_epoch(epoch), before this loop"
        yield Finding("same order", "wrong", "every epoch has the same order", loader.site, fix, evidence)


def _batch_size_findings(loaders: Loaders) -> Iterator[Finding]:
    loader, world_size = next(iter(loaders.values())), len(loaders)
    if loader.divided:
        size = loader.batch_size
        text = f"the batch of a rank shrinks with the world size: {loader.divided} is {size} on {world_size} ranks"
        fix = "nothing, if the global batch should be fixed; otherwise set a batch size per rank, and a learning rate "
        fix += "that fits the global batch"
        evidence = f"{world_size * size} samples per step; on {4 * world_size} ranks each rank would have {size / 4:g}"
        yield Finding("batch shrinks", "note", text, loader.constructed_at, fix, evidence)


def _augmentation_findings(ranks: Sequence[ScriptFacts], loaders: Loaders) -> Iterator[Finding]:
    first = next(iter(loaders.values()))
    if first.batches < 0:
        return  # the ranks of a stream may draw the same numbers on purpose, and each use a part of them
    generators = set[str].intersection(*(set(loader.random) for loader in loaders.values()))
    identical = sorted(name for name in generators if not differs(loader.random[name] for loader in loaders.values()))
    if identical:
        seed_site = ranks[0].seeds.get(identical[0].partition(",")[0], "")
        seed = "torch.manual_seed" if "torch" in identical[0] else f"{identical[0]}.seed"
        fix = f"{seed}(seed + rank), after the script creates the model"
        if identical[0].startswith(OWN_GENERATORS):
            fix = "np.random.default_rng([seed, rank]), random.Random(seed + rank), torch.Generator().manual_seed(...)"
        text = "all ranks draw the same random numbers for their samples (the same augmentation)"
        evidence = f"batches use {'; '.join(identical)}, with the same state on {format_ranks(loaders)}"
        yield Finding("same augmentation", "wrong", text, seed_site or first.site, fix, evidence)
    elif generators:
        text = "each rank draws different random numbers for its data"
        yield Finding("same augmentation", "right", text, first.site)


def _length_findings(loaders: Loaders, *, means: bool) -> Iterator[Finding]:
    """Whether ranks have the same number of batches, of the same sizes if ranks average (`means`)."""
    first, passes = next(iter(loaders.values())), _first_epochs(loaders)
    counts = ", ".join(f"rank {rank}: {loader.batches}" for rank, loader in loaders.items())
    if differs(loader.batches for loader in loaders.values()):
        text = "ranks have different numbers of batches: ranks with more batches hang at the end"
        fix = f"DistributedSampler, which pads; or `with Join([model]):` around the loop at {first.site}"
        yield Finding("uneven steps", "wrong", text, first.constructed_at, fix, counts)
        return
    sizes = [*zip(*(p.sizes for p in passes.values()), strict=False)]
    if any(p.cut_off for p in passes.values()):
        sizes = sizes[:-1]  # not all ranks have reached their real last batch
    batch = next((number for number, row in enumerate(sizes, 1) if differs(row)), None)
    if batch is not None and means:
        text = "ranks average over batches of different sizes: DDP's mean of the ranks' means weights samples unequally"
        fix = "DataLoader(..., drop_last=True), or loss.sum() * world_size / samples of all ranks"
        counts = ", ".join(f"rank {rank}: {size}" for rank, size in zip(passes, sizes[batch - 1], strict=True))
        yield Finding("unequal shares", "wrong", text, first.constructed_at, fix, f"samples in batch {batch}: {counts}")


def _input_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    inputs_by_rank = [facts.replicas[0].inputs for facts in ranks if facts.replicas]
    if len(inputs_by_rank) < 2 or not all(inputs_by_rank):
        return
    if all(len(inputs) > 1 for inputs in inputs_by_rank) and are_samples_mostly_equal(inputs_by_rank):
        site = ranks[0].steps[0].backward_site if ranks[0].steps else ranks[0].replicas[0].site
        fix = "give each rank a different part: x[rank::world_size]"
        text = "all ranks train on the same batches"
        yield Finding("same batches", "wrong", text, site, fix, "the inputs of the model are equal on all ranks")
    else:
        yield Finding("same batches", "right", "each rank has different inputs", ranks[0].replicas[0].site)


def evaluation_findings(ranks: Sequence[ScriptFacts], loaders: Loaders) -> Iterator[Finding]:
    loader = next(iter(loaders.values()))
    passes_by_rank = {rank: loader.passes[:RECORDED_EPOCHS] for rank, loader in loaders.items() if loader.passes}
    if len(passes_by_rank) == 1 and len(ranks) > 1:
        trained = [(seen.training_passes[0], seen.batches) for seen in ranks[0].loaders if seen.training_passes]
        training = [epoch for epoch in trained if epoch[0].seconds]
        evaluation_seconds = _epoch_seconds(next(iter(passes_by_rank.values()))[0], loader.batches)
        epoch_seconds = sum(_epoch_seconds(*epoch) for epoch in training)
        text = f"only {format_ranks(passes_by_rank)} evaluates"
        if training and evaluation_seconds >= MIN_COST_SECONDS and evaluation_seconds >= MIN_COST * epoch_seconds:
            evidence = f"the other ranks wait about {evaluation_seconds:.1f} s; an epoch takes {epoch_seconds:.1f} s"
            fix = f"DataLoader({RANK_SUBSET_CODE}, ...) on all ranks, and dist.all_reduce of the counts"
            yield Finding("evaluation alone", "costs", text + ", and the other ranks wait", loader.site, fix, evidence)
        elif training:
            yield Finding("evaluation alone", "right", text + ", which takes little time", loader.site)
    if len(passes_by_rank) < 2 or loader.samples < 0 or not loader.probes:
        return
    has_same_data = is_same_dataset(loaders)
    drawn_samples = sum(passes[0].drawn for passes in passes_by_rank.values())
    if has_same_data and largest_overlap_fraction([passes[0] for passes in passes_by_rank.values()]) > 1 / 2:
        yield Finding("evaluation shared", "note", "each rank evaluates all of the data", loader.site)
    elif not any(p.summed for passes in passes_by_rank.values() for p in passes):
        printing_ranks = [rank for rank, passes in passes_by_rank.items() if any(p.printed for p in passes)]
        if len(printing_ranks) == 1:
            text = f"{format_ranks(printing_ranks)} prints a metric that covers only its part of the data"
            fix = "dist.all_reduce(counts) before you divide and print them"
            evidence = "each rank evaluates a part, and no collective combines the results"
            yield Finding("score of a share", "wrong", text, loader.site, fix, evidence)
    elif has_same_data and drawn_samples > loader.samples and not any(facts.gathers_for_metrics for facts in ranks):
        text = "the metric counts samples twice: the sampler pads the parts of the ranks to the same length"
        fix = f"DataLoader({RANK_SUBSET_CODE}, ...), which does not pad"
        evidence = f"ranks evaluate {drawn_samples} samples, but the data have {loader.samples}"
        yield Finding("padded score", "wrong", text, loader.constructed_at, fix, evidence)
    elif _averages_rates([*passes_by_rank.values()]):
        text = "the metric is a mean of the ranks' rates, but the ranks evaluate different numbers of samples"
        fix = "dist.all_reduce the sums and the counts, then divide"
        counts = ", ".join(f"rank {rank}: {passes[0].drawn}" for rank, passes in passes_by_rank.items())
        site = next(p.reduced_site for passes in passes_by_rank.values() for p in passes if p.reduced)
        yield Finding("mean of means", "wrong", text, site, fix, f"the script sums rates; samples of {counts}")
    else:
        yield Finding("padded score", "right", "evaluation counts each sample once", loader.constructed_at)


def _averages_rates(passes_by_rank: Sequence[Sequence[LoaderPass]]) -> bool:
    """Whether ranks with different numbers of samples summed fractions of these (7/32, 12/45), without counts."""
    drawn_counts = [passes[0].drawn for passes in passes_by_rank]
    if max(drawn_counts) - min(drawn_counts) <= TOLERANCE * max(drawn_counts):
        return False
    rate_count, is_unweighted = 0, False
    for passes in zip(*passes_by_rank, strict=False):
        counts = [sum(p.sizes) for p in passes]
        columns = [*zip(*(p.reduced for p in passes), strict=False)]
        if tuple(counts) in columns:
            return False  # the script weights the rates
        for column in columns:
            if all(map(_is_fraction_of_count, column, counts)):
                rate_count += sum(not _is_fraction_of_count(value, 1) for value in column)
                # or weighted before the sum
                is_unweighted = is_unweighted or not all(_is_fraction_of_count(value, sum(counts)) for value in column)
    return is_unweighted and rate_count >= MIN_RATES


def _is_fraction_of_count(value: float, count: int) -> bool:
    return math.isfinite(value) and abs(value * count - round(value * count)) < ROUNDING


def _epoch_seconds(epoch_pass: LoaderPass, batches: int) -> float:
    return epoch_pass.seconds * max(1.0, batches / max(1, len(epoch_pass.sizes)))


def _masked_loss_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    for loss in ranks[0].losses:
        losses = [other for facts in ranks for other in facts.losses if other.site == loss.site]
        if len(losses) < len(ranks) or not any(c < s for o in losses for c, s in zip(o.counts, o.sizes, strict=True)):
            continue
        counts = [*zip(*(other.counts for other in losses), strict=False)]
        worst = max(counts, key=lambda row: (max(row) - min(row)) / max(1, *row), default=())
        if worst and max(worst) - min(worst) > TOLERANCE * max(worst):
            text = "the loss is a mean over different counts on each rank: each rank excludes its own padding"
            fix = 'reduction="sum", times world_size, divided by the dist.all_reduce of (target != ignore_index).sum()'
            by_rank = ", ".join(f"{facts.rank}: {count}" for facts, count in zip(ranks, worst, strict=True))
            yield Finding("mean over padding", "wrong", text, loss.site, fix, f"counted elements by rank {by_rank}")


def _local_count_findings(ranks: Sequence[ScriptFacts]) -> Iterator[Finding]:
    """The losses that each rank divides by a local count, for example the number of unmasked tokens."""
    rows = [*zip(*(next(iter(synced_steps_by_optimizer(facts)), []) for facts in ranks), strict=False)]
    counts = [*filter(None, map(_divisors, rows))]
    if len(rows) >= MIN_STEPS and len(counts) > len(rows) / 2:
        text = "the loss is a mean over different counts on each rank: each rank divides by a local count"
        fix = "the sum, times world_size, divided by the dist.all_reduce of that count"
        worst = max(counts, key=lambda row: max(row) / min(row))
        by_rank = ", ".join(f"{facts.rank}: {count:g}" for facts, count in zip(ranks, worst, strict=True))
        evidence = f"at {len(counts)} of {len(rows)} steps; largest difference, by rank {by_rank}"
        yield Finding("mean over padding", "wrong", text, rows[0][0].backward_site, fix, evidence)


def _divisors(row: Sequence[OptimizerStep]) -> list[float]:
    """The whole numbers by which ranks divided their losses, if they differ and no other factor compensates."""
    products = [abs(math.prod(step.factors)) for step in row]
    whole = ((1 / f for f in step.factors if 0 < f <= 1 / 2 and abs(1 / f - round(1 / f)) < ROUNDING) for step in row)
    divisors = [next(numbers, 0.0) for numbers in whole]
    differ = max(products) - min(products) > TOLERANCE * max(products) and differs(divisors)
    return divisors if all(divisors) and differ else []


def _padded_metric_findings(facts: ScriptFacts) -> Iterator[Finding]:
    for metric in facts.metrics:
        if not metric.name:
            text = "metrics do not change if padding is added"
            yield Finding("padding in a score", "right", text, metric.site)
            continue
        text = f"the metric counts padding: {metric.name} depends on the length of the longest sample"
        fix = "kept = labels != -100; evaluate only predictions[kept], labels[kept]"
        evidence = f"it is {metric.value:.4g}; with one more column of padding {metric.padded:.4g}"
        yield Finding("padding in a score", "wrong", text, metric.site, fix, evidence)
