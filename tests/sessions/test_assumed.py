"""What a session assumes of a loop: it is true by construction, or an error with exit code 2 before a wrong update."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.errors import codes
from tests.run_script import run_script
from tests.sessions.looped import Case
from tests.sessions.soak_loops import examine

pytestmark = pytest.mark.sample(12)

SCRIPT = Path(__file__).with_name("assumed.py")
ONCE = [1] * 40
USAGE, DIVERGED = 2, 6


def run(ranks: int, kind: str, folder: Path, *more: str) -> tuple[int, Any, str]:
    """The exit code, what the loop has found, and what it printed."""
    found = folder / "found.json"
    found.unlink(missing_ok=True)
    done = run_script(ranks, SCRIPT, kind, *more, cwd=folder)
    return done.returncode, json.loads(found.read_text()) if found.exists() else None, done.stdout + done.stderr


RIGHT = {
    "evaluation_python": ONCE, "evaluation_by_rank": ONCE,
    "growing_more": [20, 30, 40], "growing_less": [40, 30, 20], "growing_more_loader": [20, 30, 40],
    "endless": 7, "unprepared_input": 5, "order_shared": 3, "gradient_clipped": 15,
    "pickled": True,
    "by_hand_input": 5, "by_hand_teacher": 5,
    "few_gather": [0, 1, 2, 3, 4], "few_sum": [1.0, 9.0], "projected_inside": 10, "projected_back": 10,
    "mean_recomputed": 40,
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", RIGHT)
def test_it_is_the_same_as_in_one_process(tmp_path: Path, kind: str, ranks: int) -> None:
    code, found, told = run(ranks, kind, tmp_path)
    assert code == 0 and (sum(found) == 10 if kind == "few_sum" else found == RIGHT[kind]), told


EQUAL = [
    "dropped_all", "dropped_unmarked", "dropped_in_parts",
    "dropped_tuple", "dropped_dict", "dropped_list", "dropped_record", "dropped_zip", "dropped_samples",
    "average_batch_norm_merged", "two_backwards_alone",
    "weightless_labels", "weightless_masked", "weightless_constant", "weightless_class_weights", "statistics_data",
    "adagrad", "stream_before_shuffled",
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", EQUAL)
def test_its_numbers_are_those_of_the_plain_loop(tmp_path: Path, kind: str, ranks: int) -> None:
    code, found, told = run(ranks, kind, tmp_path)
    assert code == 0 and found < 1e-12, told


LAYOUTS = [  # the samples of a batch are counted wherever their dimension is
    "time_first", "time_first_pair", "time_first_two", "one_more_dimension", "dicts", "nodes", "packed", "pairs",
    "boxes", "number", "time_first_number",
]  # fmt: skip
MEANS = [
    "own_weights_given", "sum_by_samples", "sum_by_elements", "half", "tasks", "tasks_mean", "values",
    "divided_values", "weighted_values", "scaled_like_a_share", "of_same_targets",
    "terms", "of_each_sample", "of_some_samples",
]  # fmt: skip
PATHS = ["hook", "after", "function", "module", "masked", "accumulated", "tensor", "reentrant"]
ALSO = [
    *((3, f"layout_{kind}") for kind in LAYOUTS),
    *((2, "weightless_masked", strategy) for strategy in ("exact", "manual", "ddp")),
    *((2, "zeroed", strategy) for strategy in ("bucketed", "zero", "fsdp")),
    *((3, f"mean_{kind}") for kind in MEANS),
    *((2, f"mean_{kind}") for kind in ("sum_by_two_rows", "of_one_image", "and_norm", "and_sum")),
    (1, "mean_of_one_image"),
    *((3, f"loss_{kind}") for kind in ("crops", "rows", "penalty", "kept", "sam")),
    (2, "loss_contrastive"),
    *((ranks, f"path_{kind}", "bucketed") for kind in PATHS for ranks in (1, 2)),
    *((2, "path_hook", strategy) for strategy in ("exact", "ddp", "manual")),
    *((2, f"path_{kind}", "bucketed", "4") for kind in ("watched", "hook")),
    *((1, kind) for kind in ("hook_all", "hook_any", "max_norm")),  # on several ranks they are errors
]


@pytest.mark.ranks
@pytest.mark.parametrize("words", ALSO, ids=str)
def test_its_numbers_are_those_of_the_plain_loop_on_so_many_ranks(tmp_path: Path, words: tuple[Any, ...]) -> None:
    ranks, kind, *more = words
    code, found, told = run(ranks, kind, tmp_path, *more)
    assert code == 0 and found < 1e-12, told


WRONG = {
    "order_own_share": USAGE, "order_other_tail": USAGE,
    "evaluation_distributed": USAGE, "evaluation_own_share": USAGE, "evaluation_other_tail": USAGE,
    "split_by_rank": USAGE, "split_by_rank_evaluated": USAGE,
    "indices_words": USAGE, "indices_tuples": USAGE, "average_batch_norm": USAGE,
    "gradient_before": USAGE, "gradient_exact": USAGE, "gradient_after": USAGE,
    "by_hand_in_place": USAGE, "by_hand_rebound": USAGE, "frozen_by_rank": USAGE, "clipped_in_parts": USAGE,
    "written_bucketed": USAGE, "written_zero": USAGE,
    "gradient_data": USAGE, "updated_by_rank": USAGE, "statistics_instance": USAGE,
    "gradient_added": USAGE, "gradient_assigned": USAGE, "gradient_added_later": USAGE,
    "gradient_assigned_before": USAGE,
    "later_head": USAGE, "later_parameter": USAGE, "later_parametrized": USAGE, "later_appended": USAGE,
    "later_foreign": USAGE, "two_backwards_in_parts": USAGE,
    "differing_weights": DIVERGED, "differing_save": DIVERGED, "differing_end": DIVERGED,
    "unsavable_state": USAGE, "unsavable_saved": USAGE,
    "unprepared_weights": USAGE, "unprepared_in_parts": USAGE, "losses_stacked": USAGE,
    "outside_epochs": USAGE,
    "mean_sum_by_global_batch": USAGE, "mean_sum_of_losses": USAGE, "mean_share_of_mean": USAGE,
    "mean_root": USAGE, "mean_root_of_more": USAGE, "mean_decibels": USAGE, "mean_subset": USAGE,
    "mean_own_weights": USAGE, "mean_smoothed": USAGE, "mean_term_of_subset": USAGE, "mean_sums_of_samples": USAGE,
    "counted_next": USAGE, "counted_islice": USAGE, "counted_zip": USAGE,
    "projected": USAGE, "projected_data": USAGE,
    "weightless_class_unweighted": USAGE, "weightless_unweighted": USAGE, "weightless_shifted": USAGE,
    "iterator_kept": USAGE,
    "few_one": USAGE, "eval_mode": USAGE, "statistics_loader": USAGE, "constant_everywhere": USAGE,
    "buffer_by_loop": USAGE, "buffer_by_loop_float": USAGE, "hook_all": USAGE, "hook_any": USAGE, "max_norm": USAGE,
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("kind", WRONG)
def test_it_is_an_error(tmp_path: Path, kind: str) -> None:
    code, found, told = run(2, kind, tmp_path)
    assert code == WRONG[kind] and not found, told


@pytest.mark.ranks
@pytest.mark.parametrize("words", [
    ("path_hook", "zero"),  # it shards gradients, and hooks need whole ones
    *((f"path_{kind}", "bucketed", "4") for kind in ("function", "tensor", "reentrant", "module")),
], ids=str)  # fmt: skip
def test_code_on_the_gradient_path_that_would_see_other_gradients_is_an_error(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, found, told = run(2, words[0], tmp_path, *words[1:])
    assert code == USAGE and not found, told


@pytest.mark.ranks
def test_parameters_that_ddp_has_not_summed_are_named(tmp_path: Path) -> None:
    code, _, told = run(2, "unused", tmp_path)
    assert code == USAGE and {*codes(told)} == {"ddp-unused-parameters"} and "layers.1.weight" in told, told


@pytest.mark.ranks
def test_different_hooks_are_an_error_that_counts_them_on_each_rank(tmp_path: Path) -> None:
    code, found, told = run(2, "hooks_by_rank", tmp_path)
    assert code == USAGE and found is None and codes(told) == ["hooks-differ"] and "0, 1 (rank 0 first)" in told, told


def test_an_error_of_the_loops_own_keeps_its_code_and_traceback(tmp_path: Path) -> None:
    code, found, told = run(1, "failing_in_parts", tmp_path)
    assert code == 1 and found is None and "Traceback" in told and "RuntimeError" in told


ALONE = [
    "scheduler_lost", "gradient_in_parts_after", "scheduler_registered", "statistics_prepared",
    "unprepared_in_parts", "iterator_kept", "losses_stacked", "gradient_in_parts", "indices_words", "later_head",
    "later_foreign", "two_backwards_in_parts", "eval_mode", "constant_everywhere",
]  # fmt: skip


@pytest.mark.parametrize("kind", ALONE)
def test_it_is_an_error_on_one_process_too(tmp_path: Path, kind: str) -> None:
    code, found, told = run(1, kind, tmp_path)
    assert code == USAGE and found is None, told


CODES = {
    "buffer_by_loop": "buffer-changed-in-body", "buffer_by_loop_float": "buffer-changed-in-body",
    "unfrozen_later": "parameters-differ",
}  # fmt: skip


@pytest.mark.parametrize("kind", CODES)
def test_it_has_the_code_of_its_cause(tmp_path: Path, kind: str) -> None:
    code, found, told = run(1, kind, tmp_path)
    assert code == USAGE and found is None and codes(told) == [CODES[kind]], told


@pytest.mark.parametrize("kind", ["unsavable_state", "unsavable_saved"])
def test_what_no_checkpoint_can_hold_is_found_in_the_first_step(tmp_path: Path, kind: str) -> None:
    assert run(1, kind, tmp_path)[0] == USAGE
    assert (tmp_path / "steps").read_text() == "0"


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["own_state", "weights", "evaluated", "stateful"])
def test_an_interrupted_epoch_has_each_sample_once(tmp_path: Path, kind: str) -> None:
    assert run(2, f"resumed_{kind}", tmp_path)[0] == 1  # as planned
    code, found, told = run(1, f"resumed_{kind}", tmp_path)
    assert code == 0 and found == list(range(40)), told


PLAIN_AFTER_RESUME = [
    *((1, f"changing_{kind}") for kind in ("subset", "losses", "ended")),
    *((1, f"evaluated_inside_{kind}") for kind in ("unshuffled", "shuffled", "shared")),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "kind"), PLAIN_AFTER_RESUME)
def test_its_numbers_are_those_of_the_plain_loop_after_a_resume(tmp_path: Path, ranks: int, kind: str) -> None:
    assert run(ranks, kind, tmp_path)[0] == 1  # as planned
    code, found, told = run(ranks, kind, tmp_path)
    assert code == 0 and found < 1e-12, told


@pytest.mark.parametrize("kind", ["resumed_lost", "changing_dataset", "group_later"])
def test_it_is_an_error_after_a_resume(tmp_path: Path, kind: str) -> None:
    assert run(1, kind, tmp_path)[0] == 1
    code, found, told = run(1, kind, tmp_path)
    assert code == USAGE and found is None, told
    assert kind != "group_later" or codes(told) == ["parameter-groups-missing"], told


RESUMED: dict[str, Callable[[Any], bool]] = {
    "peeked": lambda found: found == 10,
    "frozen_later": lambda found: found == [False, False, True, True],
    "average_registered": lambda found: found[0] == found[1] and found[0][0] == 10,
    "average_list_registered": lambda found: found[0] == found[1],
    "average_dict_registered": lambda found: found[0] == found[1],
    "average_object_registered": lambda found: found[0] == found[1],
    "average_best": lambda found: found[0] == found[1],
    "average_list_ignored": lambda found: found[0] != found[1],
    "average_ignored": lambda found: found[0][2] == found[1][2] and found[0][1] != found[1][1],
}


@pytest.mark.parametrize("kind", RESUMED)
def test_state_after_a_resume(tmp_path: Path, kind: str) -> None:
    assert run(1, kind, tmp_path)[0] == 1  # as planned
    code, found, told = run(1, kind, tmp_path)
    assert code == 0 and RESUMED[kind](found), told


def test_copies_that_each_step_creates_are_not_state(tmp_path: Path) -> None:
    code, found, told = run(1, "average_none", tmp_path)
    assert code == 0 and found and "NOTE" not in told, told


@pytest.mark.parametrize("kind", ["unknown", "copied", "list_unknown", "dict_unknown", "object_unknown", "rebound"])
def test_an_average_that_would_be_lost_is_an_error(tmp_path: Path, kind: str) -> None:
    for _ in range(2):  # also the second time: no state without it was saved
        code, found, told = run(1, f"average_{kind}", tmp_path)
        wanted = "registered-replaced" if kind == "rebound" else "state-not-saved"
        assert code == USAGE and found is None and codes(told) == [wanted], told


TWO = Case(optimizer="two", ranks=2, ranks_after=2, virtual_ranks=2, stop=5)
RESUMED_ALONE = Case(ranks=1, virtual_ranks=2)
EXACT = Case(ranks=2, virtual_ranks=4, strategy="exact")
STOPPED = Case(ranks=2, virtual_ranks=2, stop=7)
LIKE_THE_PLAIN_LOOP = {  # weights, samples, epochs and learning rates are those of the plain loop
    **{f"two optimizers, {name}": replace(TWO, strategy=name) for name in ("bucketed", "exact", "ddp")},
    "two optimizers, accumulated": replace(TWO, accumulation=2),
    "phases": Case(phases=(2, 3, 2), ranks=2),
    "phases, resumed": replace(RESUMED_ALONE, phases=(2, 3, 2), stop=17),
    "two loops, resumed": replace(RESUMED_ALONE, loops=2, order="shuffle", stop=7),
    "a group that was added, resumed": replace(
        RESUMED_ALONE, optimizer="added_group", scheduler="step", phases=(3,), stop=8
    ),
    **{
        f"{length} batches than the sampler says, {ranks} ranks": Case(order=f"batches_{length}", ranks=ranks)
        for length in ("fewer", "more", "none")
        for ranks in (1, 2)
    },
    **{f"order {order}": Case(order=order, ranks=2) for order in ("python", "numpy", "by_rank", "lazy")},
    "order lazy, loader processes": Case(order="lazy", workers=2, ranks=2),
    **{
        f"order {order}, resumed": replace(STOPPED, order=order)
        for order in ("generator", "python", "numpy", "attribute_python", "attribute_numpy", "counter")
    },
    **{f"order {order}, exact": replace(EXACT, order=order) for order in ("shuffle", "weighted", "generator")},
    **{f"loss {loss}": replace(EXACT, loss=loss) for loss in ("per_sample", "sum")},
    "closure": replace(EXACT, closure=True),
    "average": replace(EXACT, average="registered"),
    **{f"frozen, {name}": Case(frozen=True, optimizer="groups", ranks=2, strategy=name) for name in ("exact", "fsdp")},
    **{
        f"every third batch, {name}": Case(every=3, clip="torch", ranks=2, strategy=name)
        for name in ("bucketed", "ddp", "fsdp")
    },
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", LIKE_THE_PLAIN_LOOP)
def test_it_is_the_plain_loop(tmp_path: Path, name: str) -> None:
    outcome = examine(LIKE_THE_PLAIN_LOOP[name], tmp_path)
    assert outcome.word == "equal", outcome.what


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        Case(optimizer="two", strategy="zero", ranks=2),
        Case(order="distributed", wrong="distributed", ranks=2),
        Case(order="mining", wrong="mining", ranks=2),
    ],
    ids=["a second optimizer of sharded parameters", "a sampler that divides", "an order by losses of each rank"],
)
def test_it_is_rejected(tmp_path: Path, case: Case) -> None:
    outcome = examine(case, tmp_path)
    assert outcome.word == "rejected", outcome.what


def test_a_hook_after_a_dummy_batch_runs_on_the_whole_gradient(tmp_path: Path) -> None:
    code, found, told = run(1, "hook_after_dummy_batch", tmp_path)
    assert code == 0 and found[0] and found[1] < 1e-12, told


def test_gradients_that_a_skipped_step_has_left_may_be_zeroed_in_place(tmp_path: Path) -> None:
    assert run(1, "zeroed_after_skip", tmp_path)[:2] == (0, 3)


def test_a_seed_seeds_torch_numpy_and_python(tmp_path: Path) -> None:
    found = [run(ranks, "seeded", tmp_path)[1] for ranks in (1, 1, 2)]
    assert found[0] == found[1] and found[0][0] == found[2][0]
