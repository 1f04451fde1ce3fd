"""What goes wrong without any error: from made-up marks and findings of ranks to a notice, a diagnosis, or nothing."""

import struct
from collections.abc import Mapping, Sequence

from msgspec.structs import replace
from tests.rendered import rendered

from paceline.guard.detectors import SleepingRankDetector
from paceline.guard.judge import diagnose
from paceline.guard.silent import SilentFaultDetector, SilentFaultNotice
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Op, Phase, RankSample, ScriptFault
from paceline.protocol.job import HangTimeout
from paceline.protocol.marks import BY_DDP, LAST_CALLS, MARK, ORDER, SUMMED, ReplicaFingerprint

DDP = BY_DDP | 3 << 16
CALLS = {n: Op("0", 0, "all_reduce", shape="[]", dtype="float32", site=f"train.py:{n} in main") for n in range(1, 9)}


def marks(*found: ReplicaFingerprint) -> bytes:
    fields = [(*m[:3], *m.tensor_indices, *m.hashes, *m.sums, *m.settings, m.optimizer_step) for m in found]
    return b"".join(MARK.pack(*one) for one in fields)


def step(number: int, value: int, *, flags: int = DDP, total: float = 1.0) -> ReplicaFingerprint:
    return ReplicaFingerprint(number, 7, flags, (0, 1, 2, 3), (value, number, number, number), (total,) * 4)


def calls(*hashes: int, before: int = 0) -> bytes:
    ring = [0] * LAST_CALLS
    for number, call in enumerate(hashes, before):
        ring[number % LAST_CALLS] = call
    return ORDER.pack(before + len(hashes), 9, 3) + struct.pack(f"@{LAST_CALLS}I", *ring)


def rank(number: int, *found: ReplicaFingerprint, **known: object) -> RankSample:
    known = {"step": 5, "script": True, **known}
    return RankSample(number, "n1", 7, fingerprints=marks(*found), **known)  # type: ignore[arg-type]


def silent(known: Mapping[int, Op] = CALLS) -> SilentFaultDetector:
    return SilentFaultDetector(3, lambda: {"7": ["fc.weight", "fc.bias"]}, lambda: dict.fromkeys(range(3), known))


def first(found: Sequence[Diagnosis]) -> Diagnosis | None:
    assert len(found) < 2
    return found[0] if found else None


def seen(*samples: RankSample, last: bool = False) -> Diagnosis | None:
    return first(silent().update(samples, last=last))


def test_the_rank_in_the_minority_is_named_with_the_tensor_and_the_first_step_at_which_it_differs() -> None:
    found = seen(*(rank(n, step(4, 1), step(5, 1 + (n == 1)), step(6, 9 + (n == 1))) for n in range(3)))
    assert found is not None
    assert (found.kind, found.causes, found.step) == (DiagnosisKind.DIVERGED, (1,), 5)
    rendered(found.sentences)


def test_without_a_majority_nobody_is_guilty() -> None:
    found = seen(*(rank(n, step(5, n)) for n in range(3)))
    assert found is not None and not found.causes and found.tie == ((0,), (1,), (2,))


def test_settings_of_the_optimizer_that_differ_are_told_though_no_majority_says_who_is_right() -> None:
    def told(*rates: float) -> Diagnosis:
        drifted = [step(5, n)._replace(settings=(rate, 0.5, 0.0, 0.0)) for n, rate in enumerate(rates)]
        found = seen(*(rank(n, one) for n, one in enumerate(drifted)))
        assert found is not None and not found.causes
        return found

    (_, cause) = told(0.1, 0.2, 0.2).sentences
    assert "lr" in cause and "weight_decay" not in cause and "0.2 on ranks 1, 2" in cause and "0.1 on rank 0" in cause
    assert len(told(0.1, 0.1, 0.1).sentences) == 1


def test_what_not_all_have_marked_is_not_compared_and_equal_is_right() -> None:
    assert seen(rank(0, step(4, 1)), rank(1, step(5, 2)), rank(2)) is None
    assert seen(*(rank(n, step(4, 1), step(5, 2)) for n in range(3)), last=True) is None
    assert seen(rank(0, step(4, 1)), rank(1, step(4, 2)), rank(2)) is None  # the sample of rank 2 is missing


def test_ranks_that_take_uneven_numbers_of_steps_on_purpose_are_not_compared() -> None:
    def shadowed(*steps: int, last: bool = True) -> list[SilentFaultNotice]:
        looks = silent()
        looked = [rank(n, step(5, n), uneven=n == 2, step=count) for n, count in enumerate(steps)]
        assert [*looks.update(looked, last=last), *looks.update(looked, last=last)] == []
        return looks.notices

    assert shadowed(120, 80, 131) == shadowed(120, 1, 131, last=False) == []
    (notice,) = shadowed(120, 58, 130)
    assert notice.kind == "shadowed" and "rank 1 took 58 steps" in notice.words
    rendered(notice.words)


def test_without_ddp_a_rank_that_took_far_fewer_steps_is_told_at_the_end() -> None:
    def told(*steps: int, last: bool = True) -> list[SilentFaultNotice]:
        looks = silent()
        assert looks.update([rank(n, step=count) for n, count in enumerate(steps)], last=last) == []
        return looks.notices

    assert told(240, 240, 200) == told(240, 240, 0) == told(240, 240, 152, last=False) == []
    (notice,) = told(240, 240, 152)
    assert notice.kind == "few steps" and "rank 2 took 152 steps" in notice.words
    rendered(notice.words)


def test_without_ddp_only_what_was_equal_while_it_moved_must_stay_so() -> None:
    flags = 3 << 16
    assert seen(*(rank(n, *(step(s, s + n, flags=flags) for s in range(1, 9))) for n in range(3))) is None
    moves = [step(s, s, flags=flags) for s in range(1, 8)]
    found = seen(*(rank(n, *moves, step(9, n == 1, flags=flags)) for n in range(3)))
    assert found is not None and found.causes == (1,) and found.step == 9
    stays = [step(s, 1, flags=flags) for s in range(1, 8)]
    assert seen(*(rank(n, *stays, step(9, n == 1, flags=flags)) for n in range(3))) is None, "it never moved"
    averaged = [[step(s, s + n * (s % 4 > 0), flags=flags) for s in (4, 8, 12, 16, 18, 20, 21)] for n in range(3)]
    assert seen(*(rank(n, *averaged[n]) for n in range(3))) is None  # averaged from time to time
    apart = [[step(1, n, flags=flags), *moves[1:], step(9, n, flags=flags)] for n in range(3)]
    assert seen(*(rank(n, *apart[n]) for n in range(3))) is None  # unequal at first


def test_round_off_between_machines_is_a_notice() -> None:
    several = silent()
    samples = [rank(n, step(5, n, flags=DDP | SUMMED, total=1 + 1e-7 * n)) for n in range(3)]
    assert first(several.update(samples)) is None and first(several.update(samples)) is None
    assert len(several.notices) == 1 and several.notices[0].kind == "round-off"
    assert seen(*(rank(n, step(5, n, flags=DDP | SUMMED, total=1 + 0.1 * n)) for n in range(3))) is not None


def test_the_rank_whose_own_loss_was_not_finite_is_named_once_all_have_told() -> None:
    ours = ScriptFault("not finite", 5, "its loss was nan at train.py:9, batch 5 of epoch 1")
    theirs = ScriptFault("not finite", 5, "", own=False)
    one = silent()
    partly = [rank(0), rank(1, findings=(ours,)), rank(2)]
    assert first(one.update(partly)) is None
    found = first(one.update([rank(0, findings=(theirs,)), rank(1, findings=(ours,)), rank(2, findings=(theirs,))]))
    assert found is not None and (found.kind, found.causes, found.step) == (DiagnosisKind.NOT_FINITE, (1,), 5)
    assert ours.text in found.sentences[0]
    assert first(one.update(partly)) is None
    alone = seen(*partly, last=True)
    assert alone is not None and alone.causes == (1,)


def test_the_rank_that_made_the_sum_not_finite_is_named_by_its_step() -> None:
    def told(number: int, step: int) -> RankSample:
        return rank(number, findings=(ScriptFault("not finite", step, "", own=False),))

    found = seen(told(0, 6), told(1, 5), told(2, 6))
    assert found is not None and (found.kind, found.causes, found.step) == (DiagnosisKind.NOT_FINITE, (1,), 5)
    together = seen(told(0, 5), told(1, 5), told(2, 5))
    assert together is not None and together.causes == ()


def test_what_only_some_ranks_tell_is_passed_on_once_the_others_had_the_time_to() -> None:
    stale = ScriptFault("stale", 30, "made a step without backward(), as none before: words")
    one = silent()
    for least in (31, 45):
        assert one.update([rank(0, step=least), rank(1, step=60, findings=(stale,)), rank(2, step=60)]) == []
        assert one.notices == []  # the slowest rank may still report the same
    for _ in range(2):
        one.update([rank(0, step=51), rank(1, step=60, findings=(stale,)), rank(2, step=60)])
        assert [told.kind for told in one.notices] == ["stale"]
        assert f"rank 1 {stale.text} (step 30)" in one.notices[0].words
    of_all = silent()
    of_all.update([rank(n, step=60, findings=(stale,)) for n in range(3)], last=True)
    assert of_all.notices == []


def test_where_no_majority_says_who_is_wrong_the_rank_that_left_out_a_step_is_guilty() -> None:
    left_out = ScriptFault("stale", 5, "left out a step after backward(), as never before: words")

    def told(by: Sequence[int], finding: ScriptFault = left_out) -> Diagnosis:
        found = seen(*(rank(n, step(5, n), findings=(finding,) if n in by else ()) for n in range(3)))
        assert found is not None and found.kind is DiagnosisKind.DIVERGED
        return found

    assert (told([1]).causes, told([1]).tie) == ((1,), ())
    assert left_out.text in told([1]).sentences[-1]
    assert told([0, 1, 2]).causes == told([1], replace(left_out, step=9)).causes == ()


def test_a_swallowed_exception_is_told_once_and_again_with_the_drift_that_it_made() -> None:
    one = silent()
    swallowed = ScriptFault("swallowed", 5, "ValueError in its forward, at train.py:7 in forward: bad")
    samples = [rank(n, findings=(swallowed,) if n == 1 else ()) for n in range(3)]
    assert first(one.update(samples)) is None and first(one.update(samples)) is None
    assert [told.kind for told in one.notices] == ["swallowed"]
    rendered(one.notices[0].words)
    found = first(one.update([rank(n, step(5, n == 1), findings=(swallowed,) if n == 1 else ()) for n in range(3)]))
    assert found is not None and swallowed.text in found.sentences[-1]


def test_a_swallowed_error_of_a_collective_is_a_diagnosis_with_what_others_did() -> None:
    failed = ScriptFault("collective", 39, "RuntimeError in its backward, at train.py:7: closed", last=True)
    skipped = ScriptFault("stale", 25, "skipped a batch, as never before: words")
    early = ScriptFault("swallowed", 24, "ValueError in its forward, at train.py:6: bad")
    for last in (False, True):
        samples = [rank(n, step(4, 1), findings=(skipped, early) if n == 1 else (failed,), step=39) for n in range(3)]
        one = silent()
        if not last:  # rank 1 may have been killed, which its agent has not seen yet
            assert one.update(samples) == [] and one.update(samples) == []
        found = first(one.update(samples, last=last))
        assert found is not None
        assert (found.kind, found.causes, found.step) == (DiagnosisKind.SWALLOWED, (1,), 39)
        told = {words[:6]: words for words in found.sentences}
        assert failed.text in told["rank 0"] and failed.text in told["rank 2"]
        assert all(any(one.text in words for words in found.sentences) for one in (early, skipped))
        assert one.update(samples, last=last) == []
    uneven = [rank(n, step(4, 1), findings=(failed,) if n else (), step=39 + n) for n in range(3)]
    found = first(silent().update(uneven, last=True))
    assert found is not None and found.causes == (0,)
    assert found.sentences[-1].endswith("steps")
    of_all = seen(*(rank(n, findings=(failed,)) for n in range(3)))
    assert of_all is not None and of_all.causes == ()
    with_join = seen(*(rank(n, findings=(failed,), uneven=True) for n in range(3)), last=True)
    assert with_join is not None


def test_a_thread_that_ended_is_told_and_again_when_its_rank_hangs() -> None:
    one, ended = silent(), ScriptFault("thread", 5, "its thread reader ended with OSError at train.py:7 in read: bad")
    samples = [rank(n, findings=(ended,) if n == 1 else ()) for n in range(2)]
    assert first(one.update(samples)) is None and first(one.update(samples)) is None
    assert [told.kind for told in one.notices] == ["thread"]
    assert f"rank 1: {ended.text} (after step 5)" in one.notices[0].words
    waits = Op("0", 7, "all_reduce", shape="[3]")
    hung = [Evidence.from_sample(samples[0]), Evidence.from_sample(samples[1])]
    found = diagnose([replace(hung[0], ops=(waits,), answered=True), replace(hung[1], answered=True)])
    assert found.causes == (1,) and ended.text in found.sentences


def ordered(lines: Sequence[Sequence[int]], known: Mapping[int, Op] = CALLS) -> Diagnosis | None:
    ranks = [rank(n, orders=calls(*(1, 2) * 6, *of_rank, 1, 2, 1, 2)) for n, of_rank in enumerate(lines)]
    return first(silent(known).update(ranks))


def test_two_calls_of_one_shape_that_a_rank_exchanges_are_found() -> None:
    usual = (1, 2, 1, 2)
    found = ordered([usual, (1, 2, 2, 1), usual])
    assert found is not None and (found.kind, found.causes) == (DiagnosisKind.MISMATCH, (1,))
    assert (found.op, found.site) == (CALLS[1], CALLS[2].site)
    rendered(found.sentences)
    twice = ordered([usual, (1, 2, 1, 1), usual])
    assert twice is not None and twice.causes == (1,)
    from_other_lines = ordered([usual, (1, 2, 5, 6), usual])
    assert from_other_lines is not None and from_other_lines.causes == (1,)


def test_calls_are_compared_from_look_to_look_and_ranks_may_be_at_different_places() -> None:
    one = silent()
    usual = [1, 2] * 300
    odd = [*usual[:500], 2, 1, *usual[502:]]

    def look(*counts: int) -> Diagnosis | None:
        of_ranks = [calls(*(odd if n == 1 else usual)[:count]) for n, count in enumerate(counts)]
        return first(one.update([rank(n, orders=of_rank) for n, of_rank in enumerate(of_ranks)]))

    assert look(100, 90, 40) is None
    assert look(501, 502, 503) is None  # too few calls after the difference
    found = look(600, 590, 580)
    assert found is not None and found.causes == (1,)
    assert "call 501 " in found.sentences[0]
    assert look(600, 600, 600) is None


def test_of_calls_that_nobody_has_any_more_nothing_is_said() -> None:
    late = [rank(n, orders=calls(*[1 + n % 2] * 20, before=5000 * (n == 1))) for n in range(3)]
    assert seen(*late) is None


def test_branches_by_rank_are_not_called_wrong() -> None:
    assert ordered([(1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 2)]) is None
    shapes = {**CALLS, 3: CALLS[3]}
    assert ordered([(3, 3, 3, 3), (4, 4, 4, 4), (4, 4, 4, 4)], shapes) is None


def test_at_the_end_replicas_must_have_taken_equally_many_steps() -> None:
    ranks = [rank(n, step(4, 1), step=60 + (n == 1)) for n in range(3)]
    assert seen(*ranks) is None
    found = seen(*ranks, last=True)
    assert found is not None and found.causes == (1,)
    rendered(found.sentences)
    uneven = found.sentences
    assert seen(*(rank(n, step=n) for n in range(3)), last=True) is None  # without DDP
    by_hand = [rank(n, *(step(s, s, flags=3 << 16) for s in range(1, 9)), step=60 - (n == 2)) for n in range(3)]
    found = seen(*by_hand, last=True)
    assert found is not None and found.causes == (2,)  # equal while they changed: the script keeps them equal
    drifted = [rank(n, step(4, n == 1), step=60 + (n == 1)) for n in range(3)]
    found = seen(*drifted, last=True)
    assert found is not None and found.sentences[-2:] == uneven


def asleep(
    still_seconds: float, *sleeps: int, kind: DiagnosisKind = DiagnosisKind.BEHIND
) -> tuple[Diagnosis, list[Evidence]]:
    ranks = [
        Evidence(n, "n1", 7, still_seconds=still_seconds, script=True, step=3, phase=Phase.SYNC, sleep=sleep)
        for n, sleep in enumerate(sleeps)
    ]
    return Diagnosis(kind, (1,)), ranks


def test_who_sleeps_one_sleep_for_45_seconds_is_proven_to_and_nobody_else() -> None:
    def proven(*looks: tuple[Diagnosis, list[Evidence]], windows: str = "auto") -> list[bool | None]:
        one = SleepingRankDetector(HangTimeout.parse(windows))
        return [one.proves_sleep(*look) if one.should_collect(look[1]) else None for look in looks]

    assert proven(asleep(19, -1, 5), asleep(21, -1, 5), asleep(30, -1, 5), asleep(46, -1, 5)) == [
        None,
        False,
        None,
        True,
    ]
    assert proven(asleep(21, -1, 5), asleep(46, -1, 6)) == [False, False]  # another sleep: it polls
    assert proven(asleep(21, -1, -1), asleep(46, -1, -1)) == [False, False]  # a wait, not a sleep
    assert proven(asleep(21, -1, 5), asleep(3, -1, 5), asleep(46, -1, 5)) == [False, None, False]
    assert proven(asleep(21, -1, 5), asleep(46, -1, 5), windows="300") == [None, None]
    swapped = DiagnosisKind.MISMATCH
    assert proven(asleep(21, -1, -1, kind=swapped), asleep(46, -1, -1, kind=swapped)) == [False, True]


def test_steps_of_a_rank_for_itself_before_the_training_do_not_count() -> None:
    samples = [rank(n, step(5, 1), step=5 + 500 * (n == 1), alone=500 * (n == 1)) for n in range(3)]
    assert seen(*samples, last=True) is None
    found = seen(*(replace(one, step=one.step + (one.rank == 2)) for one in samples), last=True)
    assert found is not None and found.causes == (2,)


def test_that_all_ranks_leave_ddp_is_said_once_and_of_some_nothing() -> None:
    left = (ScriptFault("left", 60, "trains on past DDP"),)
    looks = silent()
    assert looks.update([rank(0, findings=left), rank(1, findings=left), rank(2)], last=True) == []
    assert not looks.notices
    for _ in range(2):
        assert looks.update([rank(n, findings=left) for n in range(3)]) == []
    (told,) = looks.notices
    assert told.kind == "left" and "step 60" in told.words
    rendered(told.words)
