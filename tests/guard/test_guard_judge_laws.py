"""Laws of the judge, over thousands of small worlds in which the truth is known (judge_world.py)."""

from collections import Counter
from functools import cache
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace
from tests.guard.judge_world import FAIR, STRUCTURAL, SUDDEN, Case, make_case, outcome

from paceline.guard.judge import diagnose
from paceline.guard.report import MAX_COLUMNS, MAX_LINES, format_failure, format_report
from paceline.protocol.evidence import Diagnosis, Evidence, Phase

CASES = 2000
FOUND = (6023, 12904, 13729)  # a message came as another one than was sent: its sender alone was blamed


@cache
def judged() -> list[tuple[Case, Diagnosis]]:
    """Worlds in which something is to be seen."""
    cases = (make_case(seed) for seed in (*range(CASES), *FOUND))
    return [(case, diagnose(case.evidence)) for case in cases if not case.finished]


def test_over_random_programs_the_wrong_rank_is_named_or_tied_with_one_other() -> None:
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[tuple[int, str, str]] = []
    for case, diagnosis in judged():
        said = outcome(case, diagnosis)
        counts[case.mutation, said] += 1
        if said not in FAIR:
            wrong.append((case.seed, case.mutation, said))
    assert not wrong
    for mutation in (*STRUCTURAL, *SUDDEN, "cut"):  # each class by itself: none may live off the others
        assert counts[mutation, "named"] > 40, mutation
        assert counts[mutation, "unsaid"] + counts[mutation, "circle"] <= 2, mutation
    for mutation in set(SUDDEN) - {"leave"}:  # who hangs, is stopped or dies is never said to be one of two
        assert counts[mutation, "pair"] == 0


def test_two_ranks_that_disagree_are_both_named_and_neither_is_blamed() -> None:
    pairs = [v for case, v in judged() if len(case.evidence) == 2 and case.mutation in STRUCTURAL]
    assert len(pairs) > 60
    assert all(diagnosis.tie == ((0,), (1,)) and not diagnosis.causes for diagnosis in pairs)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.integers(0, 2**40), st.randoms(use_true_random=False))
def test_the_order_of_the_evidence_does_not_matter(seed: int, draw: Random) -> None:
    case = make_case(seed)
    shuffled = list(case.evidence)
    draw.shuffle(shuffled)
    one, other = diagnose(case.evidence), diagnose(shuffled)
    assert (one.kind, one.causes, one.tie, one.step) == (other.kind, other.causes, other.tie, other.step)


HOSTILE = ("", "x", "recv", "0", "\x1b[2J", "\u202e", "\udcff", "</script>", "a\nb\tc", "\x1f" * 3, "9" * 400)
NUMBERS = (-(2**63), -1, 0, 1, 2, 5, 2**32, 2**63)


def damaged(evidence: Evidence, draw: Random) -> Evidence:
    """The evidence of a worker whose box was written over: any text, any number, in some of the places."""

    def spoilt(value: object) -> object:
        match value:
            case Phase():
                return draw.choice(list(Phase)) if draw.random() < 0.3 else value
            case bool():
                return draw.random() < 0.5 if draw.random() < 0.3 else value
            case int() | None:
                return draw.choice(NUMBERS) if draw.random() < 0.1 else value
            case str():
                return draw.choice(HOSTILE) if draw.random() < 0.1 else value
            case tuple():
                return tuple(spoilt(one) for one in value if draw.random() < 0.9)
            case dict():
                return {key: spoilt(one) for key, one in value.items()}
            case Struct():
                return type(value)(**{name: spoilt(getattr(value, name)) for name in value.__struct_fields__})
            case _:
                return value

    found = spoilt(evidence)
    assert isinstance(found, Evidence)
    # which box is whose the agent knows by itself, and a record of another type is none
    return replace(found, rank=evidence.rank, failure=evidence.failure)


def test_any_evidence_gives_a_diagnosis_and_a_page_that_fits_on_the_screen() -> None:
    for case, _ in judged()[:500]:
        draw = Random(case.seed)
        evidence = [damaged(one, draw) for one in case.evidence if draw.random() < 0.95]
        diagnosis = diagnose(evidence)
        lines = format_report(diagnosis, evidence, waited_seconds=1.0, folder="f", run="r").split("\n")
        assert len(lines) <= MAX_LINES
        assert all(len(line) <= MAX_COLUMNS and line.isprintable() for line in lines), lines
        assert not (diagnosis.causes and diagnosis.tie)
        if diagnosis.failed is not None:
            assert format_failure(diagnosis, evidence, oom_kills=0, attempt_dir="a")
        assert set(diagnosis.causes) <= {one.rank for one in evidence}


def test_no_evidence_at_all_is_no_error() -> None:
    assert diagnose([]).causes == ()
