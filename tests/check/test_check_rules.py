"""Every rule of `launch --check` on made-up facts: it finds what it is for, and nothing where there is nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from tests.rendered import rendered
from torch.utils.data import DataLoader, WeightedRandomSampler

from paceline.lab.check.findings import Finding, are_samples_mostly_equal, do_all_tensors_differ
from paceline.lab.check.report import collect_findings, count_mistakes, render_report
from paceline.protocol.facts import (
    CheckpointDiff,
    DroppedGradients,
    FileAccess,
    LoaderPass,
    MaskedMeanLoss,
    OptimizerStep,
    PaddingEffect,
    ScriptFacts,
    SeenLoader,
    SeenReplica,
    SeenSchedule,
    shortened_epoch_length,
)
from paceline.runs.attempt import ScriptNotice

ORDERS = ([*range(0, 80, 2)][::-1], [*range(1, 80, 2)][::-1])
AGAIN = ([*range(6, 80, 2), 0, 2, 4], [*range(7, 80, 2), 1, 3, 5])
PROBES = [["f:a", "1"], ["f:b", "2"], ["f:c", "1"]]


def epoch(indices: list[int], **more: Any) -> LoaderPass:
    told: dict[str, Any] = {"drawn": len(indices), "sizes": [4] * 10, "trains": True, "seconds": 10.0, "ended": True}
    return LoaderPass(indices=indices, **(told | more))


def trained(rank: int, **more: Any) -> SeenLoader:
    told: dict[str, Any] = {
        "site": "t.py:9 in main",
        "constructed_at": "t.py:5 in main",
        "sampler": "DistributedSampler",
        "shuffles": True,
        "samples": 80,
        "batches": 10,
        "batch_size": 4,
        "workers": 0,
        "probes": PROBES,
        "passes": [epoch(ORDERS[rank]), epoch(AGAIN[rank])],
    }
    return SeenLoader(**(told | more))


def evaluated(rank: int, **more: Any) -> SeenLoader:
    seen = epoch([rank, rank + 2], drawn=2, trains=False, summed=True, seconds=1.0)
    told: dict[str, Any] = {"site": "t.py:20 in test", "constructed_at": "t.py:6 in main"}
    return trained(rank, **(told | {"samples": 4, "passes": [seen]} | more))


def step(**more: Any) -> OptimizerStep:
    told: dict[str, Any] = {"site": "t.py:12 in main", "loader": 0, "epoch": 1, "gradients": "g", "shapes": "s"}
    return OptimizerStep(
        0, **(told | {"backwards": 1, "forwards": 1, "synced": 1, "backward_site": "t.py:11 in main"} | more)
    )


def right(rank: int, **more: Any) -> ScriptFacts:
    told: dict[str, Any] = {
        "cores": 2,
        "threads": 1,
        "ended": True,
        "loaders": [trained(rank)],
        "steps": [step(parameters="p"), step(epoch=2)],
        "replicas": [SeenReplica("t.py:7 in main", False, False, buffers=["b"], evaluation_site="t.py:21 in test")],
    }
    return ScriptFacts(rank, 2, 2, "n1", **(told | more))


def found(of_rank: Callable[[int], ScriptFacts]) -> list[Finding]:
    return [one for one in collect_findings([of_rank(0), of_rank(1)]) if one.level in ("wrong", "costs")]


def windows(
    *backwards: int, epochs: tuple[int, ...], batches: int, scaled: float = 1.0
) -> Callable[[int], ScriptFacts]:
    """Each loss divided by four, or the gradients scaled."""
    steps = [
        step(
            backwards=n, epoch=e, factors=[0.25] if scaled == 1 else [], scaled=scaled, parameters="p" if not k else ""
        )
        for k, (n, e) in enumerate(zip(backwards, epochs, strict=True))
    ]
    return lambda rank: right(rank, steps=steps, loaders=[trained(rank, batches=batches)])


def short_window(factors: Callable[[int], dict[str, Any]]) -> Callable[[int], ScriptFacts]:
    steps = [step(backwards=n, epoch=e, **factors(n)) for n, e in zip(BACKWARDS, EPOCHS, strict=True)]
    return lambda rank: right(rank, steps=steps)


def by_rank(**of: Sequence[Any]) -> Callable[[int], ScriptFacts]:
    """Ranks that differ in these facts from what is right, and from each other."""
    return lambda rank: right(rank, **{name: values[rank] for name, values in of.items()})


def loaders(*of: tuple[SeenLoader, ...]) -> Callable[[int], ScriptFacts]:
    return lambda rank: right(rank, loaders=list(of[rank]))


def training(loader: Callable[[int], SeenLoader]) -> Callable[[int], ScriptFacts]:
    return lambda rank: right(rank, loaders=[loader(rank)])


def stepping(steps: Callable[[int], list[OptimizerStep]]) -> Callable[[int], ScriptFacts]:
    return lambda rank: right(rank, steps=steps(rank))


def replica(**more: Any) -> list[SeenReplica]:
    return [SeenReplica("t.py:7 in main", **({"by_library": False, "find_unused": False} | more))]


def averaged(*weights: str) -> Callable[[int], ScriptFacts]:
    """Steps with gradients of each rank's own, and these weights in front of them."""
    return lambda rank: right(
        rank, replicas=[], steps=[step(parameters=before, gradients=f"g{rank}") for before in weights[rank]]
    )


def by_hand(applied: float) -> Callable[[int], ScriptFacts]:
    """Batches of four samples and of three; gradients 1 and 2, of which the script makes this."""
    return lambda rank: right(
        rank,
        replicas=[],
        loaders=[trained(rank, passes=[epoch(ORDERS[rank], sizes=[4 - rank] * 10)])],
        steps=[step(parameters="p", local=1.0 + rank, applied=applied)] * 9,
    )


def of_scores(*reduced: list[float], shares: tuple[int, int] = (8, 12)) -> Callable[[int], ScriptFacts]:
    """Two evaluations of unequal shares, after which ranks sum these, half of them each time."""

    def of_rank(rank: int) -> ScriptFacts:
        half, share = len(reduced[rank]) // 2, shares[rank]
        told: dict[str, Any] = {"drawn": share, "sizes": [share], "trains": False, "summed": True}
        passes = [
            epoch([0], reduced=some, reduced_site="t.py:22 in test", **told)
            for some in (reduced[rank][:half], reduced[rank][half:])
        ]
        own = [[f"f:{rank}{n}"] for n in "abc"]
        return right(rank, loaders=[trained(rank), evaluated(rank, samples=share, probes=own, passes=passes)])

    return of_rank


def scheduled(length: int, steps: int = 20, **more: Any) -> Callable[[int], ScriptFacts]:
    """Two epochs of 10 batches, of the 80 samples in batches of 4 that two ranks share."""
    seen = [SeenSchedule("t.py:8 in main", "t.py:4 in main", steps, length)]
    taken = [step(parameters="p", epoch=1 + k // 10) for k in range(20)]
    return lambda rank: right(rank, schedules=seen, steps=taken, loaders=[trained(rank, **more)])


def saving(**more: Any) -> Callable[[int], ScriptFacts]:
    return by_rank(saved_states=([CheckpointDiff("t.py:31 in main", "state", parts=4, **more)], []))


PLATEAU = "ReduceLROnPlateau"


def drifted(schedules: Sequence[SeenSchedule] = (), **of: tuple[Any, Any]) -> Callable[[int], ScriptFacts]:
    """Weights that are other ones after the second step, of an optimizer with these settings."""

    def of_rank(rank: int) -> ScriptFacts:
        second = step(parameters="q", after="rs"[rank], **{name: values[rank] for name, values in of.items()})
        return right(rank, steps=[step(parameters="p", after="q"), second], schedules=list(schedules))

    return of_rank


def lost(*counts: int) -> Callable[[int], ScriptFacts]:
    """Windows of four micro-batches, of which so many are cleared before the step."""
    steps = [step(backwards=4, lost=count, clear_site="t.py:10 in main", parameters="p") for count in counts]
    return lambda rank: right(rank, steps=steps, loaders=[trained(rank, batches=4 * len(counts))])


NO_SHUFFLE = [epoch(ORDERS[0]), epoch(AGAIN[0])]
BACKWARDS, EPOCHS = (4, 4, 2, 4, 4, 2), (1, 1, 1, 2, 2, 2)
PITFALLS: dict[str, tuple[Callable[[int], ScriptFacts], str, int]] = {  # what is wrong -> facts, rule, line
    "the same batches": (
        loaders((trained(0, passes=NO_SHUFFLE, sampler="RandomSampler"),), (trained(1, passes=NO_SHUFFLE),)),
        "same batches", 5,
    ),
    "all of the data, in another order": (
        loaders((trained(0),), (trained(1, passes=[epoch(AGAIN[0]), epoch(ORDERS[0])]),)), "same batches", 5
    ),
    "the same stream": (
        training(lambda rank: trained(rank, batches=-1, probes=[], passes=[epoch([], leaves=[["f:1"], ["f:2"]])])),
        "same batches", 5,
    ),
    "the same tensors": (
        lambda rank: right(rank, loaders=[], replicas=replica(inputs=[["f:1"], ["f:2"]])), "same batches", 11
    ),
    "the same order": (
        training(lambda rank: trained(rank, passes=[epoch(ORDERS[rank]), epoch(ORDERS[rank])])), "same order", 9
    ),
    "the same order in epochs that are left early": (
        training(lambda rank: trained(rank, passes=[epoch(ORDERS[rank]), epoch(ORDERS[rank][:24])])), "same order", 9
    ),
    "the same order of torch's own sampler, which is too long to be drawn to its end": (
        training(
            lambda rank: trained(rank, plain=True, passes=[epoch(ORDERS[rank], cut_off=True), epoch(ORDERS[rank])])
        ), "same order", 9
    ),
    "the same augmentation": (
        lambda rank: right(rank, loaders=[trained(rank, random={"torch": "s"})], seeds={"torch": "t.py:2 in main"}),
        "same augmentation", 2,
    ),
    "data that differ under a sampler": (
        training(lambda rank: trained(rank, probes=[[f"f:{rank}"], [f"f:{rank}{rank}"]])), "same batches", 5
    ),
    "data that were shared out before Accelerate does": (
        training(
            lambda rank: trained(rank, sampler="BatchSamplerShard", probes=[[f"{rank}{n}", "", "1"] for n in "abc"])
        ), "same batches", 5
    ),
    "a mean of unequal shares' rates": (of_scores([7 / 8, 6 / 8], [5 / 12, 11 / 12]), "mean of means", 22),
    "more batches on a rank": (loaders((trained(0),), (trained(1, batches=11),)), "uneven steps", 5),
    "larger batches on a rank": (
        loaders((trained(0),), (trained(1, passes=[epoch(ORDERS[1], sizes=[3] * 10)]),)), "unequal shares", 5
    ),
    "an evaluation for which others wait": (
        lambda rank: right(
            rank,
            loaders=[trained(rank), evaluated(0, passes=[epoch([0], trains=False, seconds=9.0)])][: 2 - rank],
        ),
        "evaluation alone", 20,
    ),
    "a padded score": (
        lambda rank: right(rank, loaders=[trained(rank), evaluated(rank, samples=3)]), "padded score", 6
    ),
    "the score of a share": (
        lambda rank: right(
            rank,
            loaders=[trained(rank), evaluated(rank, passes=[epoch([rank], drawn=2, trains=False, printed=not rank)])],
        ), "score of a share", 20
    ),
    "a mean over padding": (
        by_rank(losses=[[MaskedMeanLoss("t.py:10 in main", n, [8, 8])] for n in ([4, 8], [8, 8])]),
        "mean over padding", 10,
    ),
    "no wrapped model": (by_rank(replicas=([], []), steps=([step()], [step(gradients="h")])), "gradients", 12),
    "a call past DDP": (
        by_rank(
            replicas=(replica(past_site="t.py:10 in main"),) * 2,
            steps=([step(forwards=0, synced=0)], [step(forwards=0, synced=0, gradients="h")]),
        ), "gradients", 10
    ),
    "no_sync on all": (
        by_rank(
            replicas=(replica(no_sync_site="t.py:8 in main"),) * 2,
            steps=([step(synced=0)], [step(synced=0, gradients="h")]),
        ), "gradients", 8
    ),
    "a method past DDP": (by_rank(steps=([step(forwards=0)], [step(forwards=0, gradients="h")])), "gradients", 11),
    "layers that DDP does not know": (
        by_rank(steps=([step(strangers=2)], [step(strangers=2, gradients="h")])), "gradients", 12
    ),
    "a gradient of its own": (by_rank(steps=([step()], [step(gradients="h")])), "gradients", 12),
    "a mean of its own count": (
        stepping(lambda rank: [step(parameters="p", factors=[1 / (20 + n * (1 + rank))]) for n in range(9)]),
        "mean over padding", 11,
    ),
    "larger batches on a rank, averaged by hand": (by_hand(applied=1.5), "unequal shares", 5),
    "a sum without a mean": (
        lambda rank: right(rank, replicas=[], steps=[step(parameters="p", local=1.0 + rank, applied=3.0)] * 9),
        "gradients", 12,
    ),
    "norms of its own": (
        stepping(lambda rank: [step(parameters="p", norm=2.0 + rank, limit=2.5, clip_site="t.py:11 in main")]),
        "clipping", 11,
    ),
    "another learning rate": (drifted(learning_rate=(0.1, 0.2)), "replicas", 12),
    "another learning rate by ReduceLROnPlateau": (
        drifted(learning_rate=(0.1, 0.2), schedules=[SeenSchedule("t.py:13 in main", "t.py:4", 2, -1, PLATEAU)]),
        "replicas", 13,
    ),
    "another weight decay": (drifted(settings=("s", "t")), "replicas", 12),
    "a step of its own": (drifted(), "replicas", 12),
    "weights that a rank has changed": (
        by_rank(
            steps=tuple([step(parameters="p", after="q"), step(parameters=changed, after="r")] for changed in "qx")
        ), "replicas", 12
    ),
    "gradients that are cleared in each micro-batch": (lost(3, 3, 3), "lost gradients", 10),
    "the same without a loader": (
        lambda rank: right(
            rank, loaders=[], steps=[step(loader=-1, epoch=0, backwards=4, lost=3, factors=[0.25], parameters="p")] * 3
        ), "lost gradients", 11
    ),
    "another start": (by_rank(steps=([step(parameters="p")], [step(parameters="q")])), "different start", 7),
    "a last window divided wrongly": (windows(*BACKWARDS, epochs=EPOCHS, batches=10), "last window", 11),
    "a last window scaled wrongly": (windows(*BACKWARDS, epochs=EPOCHS, batches=10, scaled=0.25), "last window", 12),
    "a score that counts padding": (
        by_rank(metrics=([PaddingEffect("t.py:40 in scores", "accuracy", 0.5, 0.4)],) * 2), "padding in a score", 40
    ),
    "generators of its own, alike": (
        training(lambda rank: trained(rank, random={"generators of its own, in the loop": "s"})), "same augmentation", 9
    ),
    "a last window that is left out": (
        lambda rank: right(
            rank,
            steps=[step(backwards=4, factors=[0.25]), step(backwards=4, factors=[0.25], epoch=2)],
            dropped=[DroppedGradients(0, 0, 1, 2, True)],
        ), "last window", 12
    ),
    "more steps on a rank": (by_rank(steps=([step()], [step(), step()])), "uneven steps", 12),
    "buffers of its own": (
        by_rank(replicas=tuple(replica(buffers=[b], evaluation_site="t.py:21 in test") for b in "ab")), "batch norm", 21
    ),
    "one file for all": (by_rank(saved_files=([FileAccess("/m.pt", "t.py:30 in main")],) * 2), "one file", 30),
    "one GPU for all": (
        by_rank(loaded_files=tuple([FileAccess("/m.pt", "t.py:3 in main", [0], own)] for own in (0, 1))), "one GPU", 3
    ),
    "a search for nothing": (by_rank(replicas=(replica(find_unused=True, looked=9),) * 2), "unused parameters", 7),
    "a schedule for one process": (scheduled(40), "schedule", 8),
    "a state without a schedule": (saving(missing=["the schedule StepLR"]), "saved state", 31),
    "a state within a window": (saving(open_window=True), "saved state", 31),
    "too many threads": (by_rank(threads=(4, 4), threads_site=("t.py:1 in main",) * 2), "threads", 1),
}  # fmt: skip

CLEAN: dict[str, Callable[[int], ScriptFacts]] = {
    "all that is right": right,
    "shares made before": training(
        lambda rank: trained(0, sampler="", probes=[[f"f:{rank}{n}", f"{rank}{n}"] for n in range(3)])
    ),
    "an order that a sampler changes after its last index, to which it was not drawn": training(
        lambda rank: trained(rank, passes=[epoch(ORDERS[rank], cut_off=True), epoch(ORDERS[rank])])
    ),
    "a last batch that only one rank has come to": training(
        lambda rank: trained(rank, passes=[epoch(ORDERS[rank], sizes=[4, 4, 4 - rank], cut_off=not rank)])
    ),
    "a stream of each rank's own with the labels of the others": training(
        lambda rank: trained(
            rank, batches=-1, probes=[], passes=[epoch([], leaves=[[f"f:{rank}{n}", n] for n in "abc"])]
        )
    ),
    "tensors of each rank's own with the lengths of the others": lambda rank: right(
        rank, loaders=[], replicas=replica(inputs=[[f"f:{rank}{n}", n] for n in "abc"])
    ),
    "shards with labels that begin alike, each shuffled with one seed": training(
        lambda rank: trained(0, sampler="RandomSampler", samples=40, probes=[[f"f:{rank}{n}", n] for n in "abc"])
    ),
    "samples that a sampler deals out, augmented on each rank in its own way": training(
        lambda rank: trained(rank, probes=[[f"f:{rank}{n}", n] for n in "abc"])
    ),
    "shards of each rank's own, of which a loop takes a part": training(
        lambda rank: trained(rank, samples=40, passes=[epoch([3, 1, 2])], probes=[[f"f:{rank}{n}"] for n in "abc"])
    ),
    "shares under a sampler that deals to one": training(
        lambda rank: trained(rank, samples=40, probes=[[f"f:{rank}{n}"] for n in "abc"])
    ),
    "rates with their counts": of_scores([7 / 8, 8.0, 6 / 8, 8.0], [5 / 12, 12.0, 11 / 12, 12.0]),
    "rates of the whole": of_scores([7 / 20, 6 / 20], [5 / 20, 11 / 20]),
    "rates of the whole that could be the shares', too": of_scores([5 / 20, 10 / 20], [10 / 20, 5 / 20]),
    "losses that are summed": of_scores([0.713, 0.619], [0.522, 0.87]),
    "rates of shares that are nearly equal": of_scores([7 / 39, 5 / 39], [5 / 40, 11 / 40], shares=(39, 40)),
    "larger batches on a rank, weighed by hand": by_hand(applied=3.0 / 7),
    "a mean of all ranks' count": stepping(
        lambda rank: [step(parameters="p", factors=[0.2 * (1 + rank), 1 / (10 + 10 * rank)]) for _ in range(9)]
    ),
    "norms of its own that are below the limit": stepping(
        lambda rank: [step(parameters="p", norm=2.0 + rank, limit=9.0)]
    ),
    "norms that are alike, to some digits": stepping(
        lambda rank: [step(parameters="p", norm=2.0 + rank / 1e6, limit=1.0)]
    ),
    "steps of its own, and an average now and then": averaged("pqar", "pqbr"),
    "a schedule for its own steps": scheduled(20),
    "a schedule for shares made before": scheduled(20, samples=40, sampler="", probes=[["", ""]]),
    "a schedule of another length": scheduled(41),
    "a schedule that Accelerate steps once for each rank": scheduled(40, steps=40),
    "an order without shuffling": training(
        lambda rank: trained(rank, shuffles=False, passes=[epoch(ORDERS[rank])] * 2)
    ),
    "random numbers of its own": training(lambda rank: trained(rank, random={"torch": f"s{rank}"})),
    "a short evaluation alone": lambda rank: right(rank, loaders=[trained(rank), evaluated(0)][: 2 - rank]),
    "an evaluation in shares": lambda rank: right(rank, loaders=[trained(rank), evaluated(rank)]),
    "padding that is dropped": lambda rank: right(
        rank, gathers_for_metrics=True, loaders=[trained(rank), evaluated(rank, samples=3)]
    ),
    "batches that Join evens out": lambda rank: right(
        rank,
        loaders=[trained(rank, batches=10 + rank)],
        replicas=replica(joined=True),
        steps=[step(parameters="p")] * (1 + rank),
    ),
    "padding alike on all ranks": by_rank(losses=([MaskedMeanLoss("t.py:10 in main", [4], [8])],) * 2),
    "gradients that are cleared now and then, after an overflow": lost(1, 1, 0, 0, 0),
    "gradients that are cleared on purpose, without a loader": lambda rank: right(
        rank, loaders=[], steps=[step(loader=-1, epoch=0, backwards=2, lost=1, parameters="p")] * 3
    ),
    "weights that stay equal": by_rank(
        steps=([step(parameters="p", after="q"), step(parameters="q", after="r", learning_rate=0.1)],) * 2
    ),
    "windows that end with the epoch": windows(4, 4, 4, 4, epochs=(1, 1, 2, 2), batches=8),
    "a short window divided by its length": short_window(lambda n: {"factors": [1 / n]}),
    "a short window scaled by its length": short_window(lambda n: {"scaled": 1 / n}),
    "a short window divided by its length, and a constant that is as large as a window": short_window(
        lambda n: {"factors": [1 / n, 0.25]}
    ),
    "scores without padding": by_rank(metrics=([PaddingEffect("t.py:40 in scores")],) * 2),
    "a short window that only the cut made": windows(*BACKWARDS, epochs=EPOCHS, batches=8),
    "files of its own": lambda rank: right(rank, saved_files=[FileAccess(f"/log-{rank}", "t.py:30 in main")]),
    "each its own GPU": lambda rank: right(rank, loaded_files=[FileAccess("/m.pt", "t.py:3 in main", [rank], rank)]),
    "unused parameters": by_rank(replicas=(replica(find_unused=True, looked=9, unused=1),) * 2),
    "a whole state": saving(),
    "a state without random states": saving(random=["torch"]),
    "a state of weights": saving(weights_only=True, missing=["the optimizer Adam"]),
    "a framework's search": by_rank(replicas=([SeenReplica("t.py:7 in main", True, True, looked=9)],) * 2),
    "shards of parameters": stepping(lambda rank: [step(gradients=f"g{rank}", shapes=f"{rank}")]),
}


@pytest.mark.parametrize("name", PITFALLS)
def test_a_pitfall_is_found_at_its_line_and_nothing_else(name: str) -> None:
    of_rank, rule, line = PITFALLS[name]
    told = found(of_rank)
    assert [(one.rule, one.site.partition(" ")[0]) for one in told] == [(rule, f"t.py:{line}")]
    assert told[0].type_instead
    assert told[0].words in render_report("t.py", [of_rank(0), of_rank(1)], told)


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    assert found(CLEAN[name]) == []


def test_weights_that_are_averaged_are_a_note_and_those_that_never_meet_again_are_wrong() -> None:
    ranks = [*map(averaged("pqar", "pqbr"), (0, 1))]
    assert [one.level for one in collect_findings(ranks) if one.rule == "gradients"] == ["note"]
    for weights in (("pas", "pbr"), ("pppp", "pppp")):
        assert [one.rule for one in found(averaged(*weights))] == ["gradients"], weights


@pytest.mark.parametrize("order", [1, -1])
def test_a_rule_says_one_thing_of_a_line_the_worst_whatever_comes_from_there(order: int) -> None:
    """A helper makes several loaders, and with Lightning all is that of `trainer.fit`."""

    def of_rank(rank: int) -> ScriptFacts:
        made = [trained(rank), trained(rank, passes=[epoch(ORDERS[rank])] * 2)]
        made += [evaluated(rank), evaluated(rank, samples=3)]
        replicas = [replica(buffers=[b], evaluation_site="t.py:21 in test")[0] for b in ("b", f"b{rank}")]
        return right(rank, loaders=made[::order], replicas=replicas[::order])

    told = collect_findings([of_rank(0), of_rank(1)])
    lines = [(one.rule, one.site) for one in told]
    assert len(lines) == len({*lines}), told
    level = {one.rule: one.level for one in told}
    assert [level[rule] for rule in ("padded score", "same order", "batch norm")] == ["wrong"] * 3, told
    assert level["same batches"] == "right"


def test_rates_that_differ_because_the_loaders_do_are_a_note() -> None:
    rates = drifted(learning_rate=(0.1, 0.2))

    def of_rank(rank: int) -> ScriptFacts:
        return msgspec.structs.replace(rates(rank), loaders=[trained(rank, batches=10 + rank)])

    assert [one.rule for one in found(of_rank)] == ["uneven steps"]
    assert [one.level for one in collect_findings([of_rank(0), of_rank(1)]) if one.rule == "replicas"] == ["note"]


def test_the_words_tell_apart_what_one_rule_finds() -> None:
    words = {name: found(of_rank)[0].words for name, (of_rank, _, _) in PITFALLS.items()}
    rendered(f"{name}: {of_rule}" for name, of_rule in words.items())
    assert len(set(words.values())) == len(words) - 9  # some are seen in two ways


def test_the_page_says_what_is_right_and_how_much_is_not() -> None:
    ranks = [right(0), right(1)]
    findings = collect_findings(ranks)
    text = render_report("t.py", ranks, findings)
    assert count_mistakes(findings) == 0
    rendered(text)


def test_what_was_reported_while_the_script_ran_is_part_of_the_diagnosis() -> None:
    def told(*kinds: str, of_rank: Callable[[int], ScriptFacts] = right) -> dict[str, str]:
        noted = [ScriptNotice(0.0, f"rank 1: {kind}", 5, kind) for kind in kinds]
        findings = collect_findings([of_rank(0), of_rank(1)], noted)
        return {one.rule: one.level for one in findings if one.rule in kinds}

    wrong = ("diverged", "not finite", "mismatch", "swallowed", "thread", "stale", "few steps", "a later kind")
    for kind in wrong:
        assert told(kind) == {kind: "wrong"}
    assert told("slow", "shadowed", "round-off", "") == dict.fromkeys(("slow", "shadowed", "round-off"), "note")
    assert told("diverged", of_rank=drifted(settings=("s", "t"))) == {"diverged": "note"}  # explained by the other
    twice = [ScriptNotice(0.0, f"rank {rank}", 5, "swallowed") for rank in range(2)]
    findings = collect_findings([right(0), right(1)], twice)
    assert [one.words for one in findings if one.level == "wrong"] == ["rank 0", "rank 1"]


def test_a_script_that_failed_is_not_called_right() -> None:
    ranks = [right(0), right(1)]
    headline = render_report("t.py", ranks, collect_findings(ranks), code=3).splitlines()[0]
    assert "nothing wrong" not in headline and "exit code 3" in headline


def weighted(name: str, batch_sampler: str = "") -> list[str]:
    """What is to be typed in place of a sampler of this class, whose indices are the same on all ranks."""
    more = {"sampler": name, "batch_sampler": batch_sampler, "passes": NO_SHUFFLE}
    (one,) = found(loaders((trained(0, **more),), (trained(1, **more),)))
    return one.type_instead.splitlines()


def test_the_advice_for_a_weighted_sampler_runs_and_keeps_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 6.0])
    data = torch.utils.data.TensorDataset(torch.arange(5.0))
    known = {"torch": torch, "DataLoader": DataLoader, "WeightedRandomSampler": WeightedRandomSampler, "data": data}
    known |= {"weights": weights, "num_samples": 6001, "batch_size": 100, "seed": 3, "world_size": 3}
    drawn: dict[tuple[int, int], list[int]] = {}
    for epoch in range(2):
        for rank in range(3):
            scope: dict[str, Any] = {**known, "epoch": epoch, "rank": rank}
            exec("\n".join(weighted("WeightedRandomSampler")[1:]), scope)
            drawn[epoch, rank] = [int(x) for (batch,) in scope["loader"] for x in batch]
    assert {len(indices) for indices in drawn.values()} == {2000}
    assert drawn[0, 0] != drawn[0, 1] != drawn[0, 2] and drawn[0, 0] != drawn[1, 0]
    for indices in drawn.values():
        counts = torch.bincount(torch.tensor(indices), minlength=5) / len(indices)
        assert torch.allclose(counts, weights / weights.sum(), atol=0.05)
    one = torch.utils.data.WeightedRandomSampler(
        [0.0, 1.0, 3.0, 0.0, 6.0], 6001, generator=torch.Generator().manual_seed(3)
    )
    of_all = [index for indices in zip(*(drawn[0, rank] for rank in range(3)), strict=True) for index in indices]
    assert of_all == [*one][:6000]  # together the ranks draw as one process


def test_the_advice_keeps_what_another_sampler_chooses() -> None:
    for name, argument in (("SubsetRandomSampler", " sampler="), ("Balanced", " sampler=")):
        *_, last = weighted(name)
        assert argument in last and "rank::world_size" in last
    assert " batch_sampler=" in weighted("RandomSampler", "Buckets")[-1]
    assert "DistributedSampler(data)" in weighted("RandomSampler")[0]


def test_a_cut_epoch_ends_as_the_whole_one_does() -> None:
    for batches in range(300):
        kept = shortened_epoch_length(batches)
        assert kept <= min(batches, 47)
        assert all(kept % window == batches % window for window in (1, 2, 3, 4, 6, 8, 12, 24))


def test_a_tensor_tells_samples_apart_only_if_it_varies() -> None:
    assert are_samples_mostly_equal([[["1", "f:a"], ["1", "f:b"]], [["1", "f:a"], ["1", "f:b"]]])
    assert not are_samples_mostly_equal([[["1"], ["1"]], [["1"], ["1"]]])  # a mask, and nothing else
    assert not are_samples_mostly_equal([[["1", "f:a"], ["1", "f:b"]], [["1", "f:x"], ["1", "f:y"]]])  # a mask alike
    assert not are_samples_mostly_equal([[["", "f:a"]], [["", "f:b"]]])


def same(*rows: str, of_other: str) -> bool:
    """Whether batches with these fields are the same on two ranks; "?": unknown, or equal elements."""

    def leaves(words: str) -> list[str]:
        return ["" if word == "?" else word for word in words.split()]

    return are_samples_mostly_equal([[leaves(row) for row in rows], [leaves(row) for row in of_other.split("; ")]])


def test_batches_are_the_same_if_all_their_fields_are_in_most_of_them() -> None:
    assert not same("1 f:a", "2 f:b", of_other="1 f:x; 2 f:y")  # equal labels, different inputs
    assert not same("f:a 1", "f:b 2", "f:c 3", of_other="f:x 1; f:y 2; f:z 3"), "in any order"
    assert not same("f:a f:l", "f:b f:m", of_other="f:x f:l; f:y f:m")  # floating-point lengths
    assert not same("1 f:a", "2 f:b", "3 f:c", of_other="1 f:a; 2 f:y; 3 f:z")  # one of three batches
    assert not same("1 f:a", "2 f:b", of_other="1 f:a; 2 f:y"), "one of two"
    assert not same("1 2", "2 3", of_other="1; 2")  # different numbers of tensors
    assert same("1 f:a", "2 f:b", "3 f:c", of_other="1 f:a; 2 f:b; 3 f:z")  # a batch in which a rank is ahead
    assert same("1 ?", "2 ?", of_other="1 ?; 2 ?")  # inputs with random numbers of a separate generator
    assert same("0 1 f:a", "0 2 f:b", of_other="1 1 f:a; 1 2 f:b")  # the rank is a tensor of the sample
    assert same("? f:a", "2 f:b", of_other="? f:a; 2 f:b")  # a batch with one label


def test_samples_are_unlike_if_none_of_their_fields_is_the_same() -> None:
    assert do_all_tensors_differ([[["1", "f:a"], ["2", "f:b"]], [["3", "f:x"], ["4", "f:y"]]])
    assert not do_all_tensors_differ([[["1", "f:a"], ["2", "f:b"]], [["1", "f:x"], ["2", "f:y"]]])  # augmentation
    assert not do_all_tensors_differ([[[""]], [[""]]]), "nothing is known"
    labels, others = "021120", "022121"
    columns = [[[a, f"f:{rank}{n}"] for n, a in enumerate(its)] for rank, its in enumerate((labels, others))]
    assert do_all_tensors_differ(columns)  # 4 of 6 labels are equal by chance


def test_a_batch_that_shrinks_with_the_world_is_a_note_with_its_numbers() -> None:
    def shrinks(divided: str) -> list[Finding]:
        told = collect_findings([right(rank, loaders=[trained(rank, divided=divided)]) for rank in range(2)])
        return [one for one in told if one.rule == "batch shrinks"]

    (one,) = shrinks("total // world")
    assert (one.level, one.site) == ("note", "t.py:5 in main")
    rendered([one.words, one.seen])
    assert shrinks("") == []


def shards(rank: int, *, start: str = "differs", **more: Any) -> list[OptimizerStep]:
    """Of a shared parameter, and of one that each rank has for itself."""
    own, whole = (f"w{rank}", f"p{rank}") if start == "differs" else ("w", "p")
    told: dict[str, Any] = {
        "own": True, "outside": [1], "strangers": 1, "exchanged": 2,
        "gradients": f"g{rank}", "parameters": whole, "after": f"a{rank}",
        "each": ["g", f"h{rank}"], "each_before": ["p", own], "each_after": ["a", own],
    }  # fmt: skip
    return [step(**(told | more))] * 8


def test_parameters_that_ranks_have_for_themselves_and_exchange_are_noted_and_the_others_judged() -> None:
    def levels(of_rank: Callable[[int], list[OptimizerStep]], **more: Any) -> set[tuple[str, str]]:
        found = collect_findings([right(rank, steps=of_rank(rank), **more) for rank in range(2)])
        return {
            (one.rule, one.level) for one in found if one.rule in ("own parameters", "gradients", "different start")
        }

    fine = {("own parameters", "note"), ("gradients", "right"), ("different start", "right")}
    assert levels(shards) == fine == levels(lambda rank: shards(rank, outside=[0, 1], own=False), replicas=[])
    assert ("gradients", "wrong") in levels(lambda rank: shards(rank, exchanged=0))  # ranks exchange nothing
    assert ("gradients", "wrong") in levels(lambda rank: shards(rank, start="equal"))  # not in DDP
    assert ("gradients", "wrong") in levels(lambda rank: shards(rank, outside=[])), "DDP has it"

    def unwrapped(rank: int) -> list[OptimizerStep]:
        return shards(rank, outside=[0, 1], own=False, each=[f"g{rank}", f"h{rank}"])

    assert ("gradients", "wrong") in levels(unwrapped, replicas=[])


def test_steps_of_a_rank_for_itself_are_not_compared_and_past_ddp_is_a_note_unless_weights_drift() -> None:
    joint = [step(own=True, met=True, parameters=f"p{n}", after=f"p{n + 1}") for n in range(6)]

    def private(rank: int) -> list[OptimizerStep]:
        return [step(gradients=f"g{rank}{n}", shapes="other", loader=-1) for n in range(300 * (1 - rank))]

    def told(of_rank: Callable[[int], list[OptimizerStep]]) -> list[tuple[str, str]]:
        found = collect_findings([right(rank, steps=of_rank(rank)) for rank in range(2)])
        return [(one.rule, one.level) for one in found if one.level == "wrong" or one.rule == "past DDP"]

    first = [msgspec.structs.replace(one, optimizer=-1) for one in private(0)]
    assert told(lambda rank: [*first[: 300 * (1 - rank)], *joint]) == []  # a separate optimizer
    alone = [step(own=True, past=True, forwards=0, gradients=f"g{n}") for n in range(9)]
    assert told(lambda rank: [*joint, *alone[rank : 3 + 4 * rank]]) == [("past DDP", "note")]
    drifts = msgspec.structs.replace(joint[5], parameters="other")
    assert told(lambda rank: [*joint, *alone[:rank], drifts if rank else joint[5]]) == [("gradients", "wrong")]
    second = [msgspec.structs.replace(one, optimizer=1) for one in (alone[0], *joint[1:])]
    assert told(lambda rank: [*joint, *second]) == []  # one forward for two optimizers, as for a GAN in one replica
    left = [msgspec.structs.replace(one, optimizer=1) for one in alone]
    assert told(lambda rank: [*joint, *left[rank:]]) == [("past DDP", "note")]


def test_the_learning_rate_is_the_highest_that_was_seen() -> None:
    steps = [step(own=True, learning_rate=rate) for rate in (0.0, 0.01, 0.02, 0.01)]
    findings = collect_findings([right(rank, steps=steps) for rank in range(2)])
    (note,) = (one for one in findings if one.rule == "learning rate")
    assert note.words.endswith("learning rate 0.02")


def test_an_epoch_that_is_trained_again_is_no_epoch_like_every_other() -> None:
    """As after a checkpoint was loaded."""

    def told(rank: int, third: list[int]) -> ScriptFacts:
        passes = [epoch(ORDERS[rank]), epoch(ORDERS[rank]), epoch(third)]
        return right(rank, loaders=[trained(rank, passes=passes)])

    assert found(lambda rank: told(rank, AGAIN[rank])) == []
    for third in (ORDERS, [order[:8] for order in ORDERS], ([], [])):
        assert [one.rule for one in found(lambda rank, third=third: told(rank, third[rank]))] == ["same order"]


def test_ranks_that_split_layers_rightly_have_the_same_batches_and_groups_of_them_have_not() -> None:
    def told(world: int, split: int) -> set[tuple[str, str]]:
        one = right(0, loaders=[trained(0)], replicas=[], split=split)
        ranks = [msgspec.structs.replace(one, rank=n, world=world, split_rank=n % split) for n in range(world)]
        return {
            (one.rule, one.level) for one in collect_findings(ranks) if one.rule in ("same batches", "learning rate")
        }

    wrong = {("same batches", "wrong"), ("learning rate", "note")}
    assert told(2, 2) == set() and told(2, 1) == told(4, 2) == wrong


def test_of_a_session_only_what_it_does_not_check_itself_is_a_mistake_and_what_to_type_fits_it() -> None:
    steps = [step(lost=3, backwards=4, gradients="g"), step(lost=3, backwards=4, gradients="h")] * 4
    written = [FileAccess("/m.pt", "t.py:30 in main")]
    more: dict[str, Any] = {"session": True, "saved_files": written, "threads": 4, "threads_site": "t.py:1 in main"}
    told = collect_findings([right(rank, steps=steps[rank:], replicas=[], **more) for rank in range(2)])
    assert {(one.rule, one.level) for one in told} == {("one file", "wrong"), ("threads", "costs"), ("session", "note")}
    typed = {one.rule: one.type_instead for one in told}
    assert typed["threads"] == "session(threads=1)" and "s.save(" in typed["one file"]
