"""Detects faults of a script that raise no error: diverging replicas, gradients that are not finite. Without I/O.

`SilentFaultDetector.update` processes samples of all ranks repeatedly. It collects notices for the user, and returns a
diagnosis that ends the run if results are wrong.

It compares fingerprints of parameters that must be equal on ranks, and the order of collectives. It compares only
fingerprints of the same step, and only if all ranks that must be equal have one. Parameters that DDP keeps equal must
be equal from the first step. Other parameters must be equal only if they were equal several times while they changed.
Replicas that are averaged from time to time are not compared: they are unequal first and equal later.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from paceline.guard.detectors import median_without
from paceline.guard.sentences import format_ranks, format_subject_verb
from paceline.guard.waits import group_ranks_by_key, ranks_outside_majority
from paceline.protocol import marks
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Op, RankSample, ScriptFault
from paceline.protocol.marks import CallHistory, CallMismatch, ReplicaFingerprint

NO_PART = 0xFFFFFFFF
MIN_EQUAL_OBSERVATIONS = 3  # observations of a part that was equal on all ranks and had changed
ROUND_OFF_TOLERANCE = 1e-5  # relative difference of a sum
CALL_WINDOW = 4  # calls after a difference that must be known

FingerprintsByRank = Mapping[int, ReplicaFingerprint]  # rank -> its fingerprint after one step
CallHashes = Sequence[int]


@dataclass(frozen=True)
class ReplicaDifference:
    fingerprints: FingerprintsByRank
    part_index: int  # index of the part that differs
    last_equal_step: int  # the last step after which all ranks were equal; 0: none

    @property
    def any_fingerprint(self) -> ReplicaFingerprint:
        """The fingerprint of any rank, for the fields that are equal on all ranks."""
        return next(iter(self.fingerprints.values()))

    @property
    def rank_groups(self) -> Sequence[Mapping[int, int]]:
        hashes = {rank: mark.hashes[self.part_index] for rank, mark in self.fingerprints.items()}
        return group_ranks_by_key(hashes, lambda value: value)

    @property
    def minority_ranks(self) -> tuple[int, ...]:
        return ranks_outside_majority(self.rank_groups)

    @property
    def is_round_off(self) -> bool:
        sums = [mark.sums[self.part_index] for mark in self.fingerprints.values()]
        is_close = max(sums) - min(sums) <= ROUND_OFF_TOLERANCE * max(map(abs, sums))
        return is_close and bool(self.any_fingerprint.flags & marks.SUMMED)


class ReplicaComparison:
    def __init__(self) -> None:
        self._equal: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # part -> last equal step, hash, proofs
        self._differed: dict[tuple[int, int, int], int] = {}  # part -> the last step after which it was unequal
        self._apart: set[tuple[int, int, int]] = set()  # parts that may differ between ranks
        self._last: dict[tuple[int, int], int] = defaultdict(int)  # table -> the last step after which it was equal

    @property
    def has_synced_parameters(self) -> bool:
        """Whether there are parameters that the script itself, not DDP, keeps equal."""
        return any(proofs >= MIN_EQUAL_OBSERVATIONS for *_, proofs in self._equal.values())

    def update(self, fingerprints_by_rank: Mapping[int, Sequence[ReplicaFingerprint]]) -> list[ReplicaDifference]:
        by_step: dict[tuple[int, int, int], dict[int, ReplicaFingerprint]] = defaultdict(dict)
        for rank, fingerprints in fingerprints_by_rank.items():
            for mark in fingerprints:
                by_step[mark.table_index, mark.layout, mark.optimizer_step][rank] = mark
        differences: dict[tuple[int, int], ReplicaDifference] = {}
        for (*key, number), by_rank in sorted(by_step.items()):
            table, layout = key
            if not 1 < next(iter(by_rank.values())).num_ranks <= len(by_rank):
                continue
            at = self._differing_part(by_rank)
            if at is not None:
                differences.setdefault((table, layout), ReplicaDifference(by_rank, at, self._last[table, layout]))
            elif (table, layout) not in differences:
                self._last[table, layout] = max(self._last[table, layout], number)
        return [d for d in differences.values() if _part(d.any_fingerprint, d.part_index) not in self._apart]

    def _differing_part(self, fingerprints: FingerprintsByRank) -> int | None:
        first = next(iter(fingerprints.values()))
        for at, part in enumerate(first.tensor_indices):
            hashes, key = {mark.hashes[at] for mark in fingerprints.values()}, _part(first, at)
            equal_step, equal_hash, proofs = self._equal.get(key, (0, 0, 0))
            if part == NO_PART:
                continue
            if len(hashes) > 1:
                if first.flags & marks.BY_DDP:
                    return at
                self._differed[key] = first.optimizer_step
                if proofs >= MIN_EQUAL_OBSERVATIONS and key not in self._apart:
                    return at
                self._apart.add(key)
            elif first.optimizer_step > equal_step:
                has_changed = equal_step > 0 and hashes != {equal_hash}
                if self._differed.get(key, first.optimizer_step) < first.optimizer_step:
                    self._apart.add(key)
                self._equal[key] = first.optimizer_step, min(hashes), proofs + has_changed
        return None


def _part(mark: ReplicaFingerprint, at: int) -> tuple[int, int, int]:
    return mark.table_index, mark.layout, mark.tensor_indices[at]


class CallOrderComparison:
    def __init__(self) -> None:
        self._done: dict[int, int] = defaultdict(int)  # group -> number of compared calls
        self.agreed: set[int] = set()  # hashes of the calls that all ranks have made at the same position

    def update(
        self, orders: Mapping[int, Sequence[CallHistory]], *, last: bool
    ) -> Iterator[tuple[int, Mapping[int, CallHashes]]]:
        """The positions at which ranks differ, each once: number of calls before it, and the next calls of each rank.

        CALL_WINDOW calls must follow the position, unless these samples are the `last` ones.
        """
        by_group: dict[int, dict[int, CallHistory]] = defaultdict(dict)
        for rank, rank_orders in orders.items():
            for order in rank_orders:
                by_group[order.group][rank] = order
        for group, by_rank in by_group.items():
            if not 1 < next(iter(by_rank.values())).num_ranks <= len(by_rank):
                continue
            start = max(self._done[group], *(order.first_call_number for order in by_rank.values()))
            end = min(order.num_calls for order in by_rank.values())
            while start < end:
                calls = {
                    rank: order.calls[start - order.first_call_number : end - order.first_call_number]
                    for rank, order in by_rank.items()
                }
                places = enumerate(zip(*calls.values(), strict=True))
                num_equal = next((number for number, at in places if len({*at}) > 1), end - start)
                self.agreed.update(next(iter(calls.values()))[:num_equal])
                start += num_equal
                if start == end or (end - start < CALL_WINDOW and not last):
                    break
                yield (
                    start,
                    {rank: rank_calls[num_equal : num_equal + CALL_WINDOW] for rank, rank_calls in calls.items()},
                )
                start = min(end, start + CALL_WINDOW)
            self._done[group] = start


def find_order_mismatch(windows: Mapping[int, Sequence[Op]], known: frozenset[str]) -> CallMismatch | None:
    """The mismatch at one position; None if the script calls from different branches. `known`: lines of all ranks."""
    ranks = sorted(windows)  # all ranks of the world
    mismatch = marks.compare_call_orders([windows[rank] for rank in ranks], frozenset(), known)
    if isinstance(mismatch, CallMismatch):
        return mismatch
    for calls in zip(*(windows[rank] for rank in ranks), strict=True):
        labels = dict(zip(ranks, (marks.compared_call_parts(op, frozenset()) for op in calls), strict=True))
        if len({*labels.values()}) > 1 and {op.site for op in calls} <= known:
            return CallMismatch(calls, ranks_outside_majority(group_ranks_by_key(labels, lambda label: label)))
    return None


MAX_REPORT_UPDATES = 3  # calls of `update` until every rank has reported the same event, or has ended
LATE_STEPS = 20  # steps after which the other ranks no longer report the same finding
MOST_PARTIES = 4
MIN_STEP_FRACTION = 0.5  # a rank with a smaller part of the others' steps is reported, though this may be intended
MIN_STEP_FRACTION_WITHOUT_DDP = 0.8  # the same without DDP, where ranks need not take the same number of steps

CollectCalls = Callable[[], Mapping[int, Mapping[int, Op]]]
ReadTensorNames = Callable[[], Mapping[str, Sequence[str]]]


class SilentFaultNotice(NamedTuple):
    kind: str
    words: str


class SilentFaultDetector:
    """Detects silent faults of one generation. It reports each fault once."""

    def __init__(self, world_size: int, names: ReadTensorNames, calls: CollectCalls) -> None:
        self._size, self._names, self._calls = world_size, names, calls
        self._comparison, self._orders = ReplicaComparison(), CallOrderComparison()
        self._reported: set[tuple[object, ...]] = set()
        self._looks: dict[str, int] = {}  # calls of `update` since the first rank reported a finding of this kind
        self._known: Mapping[int, Mapping[int, Op]] = {}
        self.notices: list[SilentFaultNotice] = []  # to print; the caller empties the list

    def update(self, ranks: Sequence[RankSample], *, last: bool = False) -> list[Diagnosis]:
        """Process samples of all ranks, including ended ones. `last`: all ranks have ended without failure."""
        self._report_swallowed_errors(ranks)
        self._report_stale_findings(ranks, last=last)
        self._report_left_ddp(ranks)
        collective = self._diagnose_failed_collective(ranks, last=last)
        if collective is not None and last and (uneven := self._diagnose_uneven_ends(ranks)) is not None:
            collective = replace(collective, sentences=(*collective.sentences, *uneven.sentences))
        diagnoses = [collective, self._diagnose_not_finite(ranks, last=last)]
        if last and any(sample.uneven for sample in ranks):
            self._report_shadowed_ranks(ranks)
        if any(sample.uneven for sample in ranks) or any((kind,) not in self._reported for kind in self._looks):
            return [diagnosis for diagnosis in diagnoses if diagnosis is not None]
        fingerprints = {s.rank: marks.parse_fingerprints(s.fingerprints) for s in ranks if s.fingerprints}
        differing = self._comparison.update(fingerprints)
        orders = {sample.rank: marks.parse_call_tables(sample.orders) for sample in ranks if sample.orders}
        diagnoses += [self._diagnose_order(at, calls) for at, calls in self._orders.update(orders, last=last)]
        uneven = self._diagnose_uneven_ends(ranks) if last else None
        for difference in differing:
            diverged = self._diagnose_divergence(difference, ranks)
            if diverged is not None and uneven is not None:  # this may be the reason
                diverged, uneven = replace(diverged, sentences=(*diverged.sentences, *uneven.sentences)), None
            diagnoses.append(diverged)
        return [diagnosis for diagnosis in (*diagnoses, uneven) if diagnosis is not None]

    def _is_first_report(self, *key: object) -> bool:
        is_known = key in self._reported
        self._reported.add(key)
        return not is_known

    def _notify(self, kind: str, text: str) -> None:
        self.notices.append(SilentFaultNotice(kind, text))

    def _report_swallowed_errors(self, ranks: Sequence[RankSample]) -> None:
        for sample in ranks:
            for finding in sample.findings:
                if finding.kind == "swallowed" and self._is_first_report("swallowed", sample.rank, finding.text):
                    self._notify("swallowed", f"rank {sample.rank} {_continued(finding)}")
                if finding.kind == "thread" and self._is_first_report("thread", sample.rank, finding.text):
                    text = f"rank {sample.rank}: {finding.text} (after step {finding.step})"
                    self._notify("thread", text)

    def _take_findings(self, ranks: Sequence[RankSample], kind: str, *, last: bool) -> dict[int, ScriptFault]:
        """The findings of this kind, once, when all ranks have had time to report them; empty before and after."""
        findings = _findings(ranks, kind)
        if not findings or (kind,) in self._reported:
            return {}
        self._looks[kind] = self._looks.get(kind, 0) + 1
        if len(findings) < self._size and self._looks[kind] < MAX_REPORT_UPDATES and not last:
            return {}
        self._reported.add((kind,))
        return findings

    def _diagnose_failed_collective(self, ranks: Sequence[RankSample], *, last: bool) -> Diagnosis | None:
        """A collective that failed on some ranks, which ignored the error: at least one batch is lost."""
        failed = self._take_findings(ranks, "collective", last=last)
        if not failed:
            return None
        swallowed = ((s.rank, f) for s in ranks for f in s.findings if f.kind == "swallowed")
        lines = [f"rank {rank} {_continued(finding)}" for rank, finding in (*sorted(failed.items()), *swallowed)]
        stale = _findings(ranks, "stale")
        stale = stale if len(stale) < self._size else {}
        others = tuple(sample.rank for sample in ranks if sample.rank not in failed)
        if others:
            lines.append(f"{format_subject_verb(others, 'has', 'have')} called fewer or different collectives")
        lines += [f"rank {rank} {finding.text} (step {finding.step})" for rank, finding in stale.items()]
        causes = others or tuple(sorted(stale))
        step = max(f.step for f in failed.values())
        return Diagnosis(DiagnosisKind.SWALLOWED, causes, sentences=tuple(lines), step=step)

    def _report_stale_findings(self, ranks: Sequence[RankSample], *, last: bool) -> None:
        """Report findings that only some ranks have made, after all ranks had time to make them."""
        stale = [(sample.rank, finding) for sample in ranks for finding in sample.findings if finding.kind == "stale"]
        least_step = min(sample.step for sample in ranks)
        for start in {finding.text.partition(",")[0] for _, finding in stale}:
            similar = [(rank, finding) for rank, finding in stale if finding.text.startswith(start)]
            late = last or all(least_step > finding.step + LATE_STEPS for _, finding in similar)
            if late and len({rank for rank, _ in similar}) < self._size and self._is_first_report("stale", start):
                for rank, finding in similar:
                    self._notify("stale", f"rank {rank} {finding.text} (step {finding.step})")

    def _report_left_ddp(self, ranks: Sequence[RankSample]) -> None:
        """Report that all ranks train without DDP after they have trained with it. This may be intended."""
        findings = _findings(ranks, "left")
        if len(findings) == self._size > 1 and self._is_first_report("left"):
            step = min(finding.step for finding in findings.values())
            text = f"no rank trains through DDP after step {step}: paceline no longer compares steps and parameters"
            self._notify("left", text)

    def _report_shadowed_ranks(self, ranks: Sequence[RankSample]) -> None:
        """Report ranks that Join has shadowed for most of the time: their data may have ended too early."""
        ordered = sorted(rank.joint_steps for rank in ranks)
        for rank in ranks if len(ranks) > 1 else ():
            others = median_without(ordered, rank.joint_steps)
            if rank.joint_steps < MIN_STEP_FRACTION * others and self._is_first_report("shadowed", rank.rank):
                text = f"rank {rank.rank} took {rank.joint_steps} steps, the others {others:g}. If its data ended too "
                self._notify("shadowed", text + "early, Join hides this")

    def _diagnose_not_finite(self, ranks: Sequence[RankSample], *, last: bool) -> Diagnosis | None:
        applied = self._take_findings(ranks, "not finite", last=last)
        if not applied:
            return None
        step = min(finding.step for finding in applied.values())
        local = {rank: finding for rank, finding in sorted(applied.items()) if finding.own and finding.step <= step + 1}
        lines = [f"rank {rank}: {finding.text}" for rank, finding in local.items()]
        first = [rank for rank, finding in applied.items() if finding.step == step]
        if not local and len(first) < self._size:  # the NaN reaches the other ranks one step later
            local = {rank: applied[rank] for rank in sorted(first)}
            lines = [f"only {format_ranks(local)}: the gradients and losses of each rank and their sum were finite"]
        elif not local:
            lines = ["the gradients and losses of each rank were finite, but their sum over ranks is not"]
        lines.append(
            f"{format_subject_verb(applied, 'has', 'have')} updated parameters with gradients that are NaN or infinite"
        )
        causes = tuple(sorted(local or applied))
        causes = causes if len(causes) < self._size or self._size == 1 else ()
        return Diagnosis(DiagnosisKind.NOT_FINITE, causes, sentences=tuple(lines), step=step)

    def _diagnose_divergence(self, difference: ReplicaDifference, ranks: Sequence[RankSample]) -> Diagnosis | None:
        names, mark = self._names().get(str(difference.any_fingerprint.layout), ()), difference.any_fingerprint
        part = mark.tensor_indices[difference.part_index]
        tensor = names[part] if part < len(names) else f"part {part}"
        equal_step = difference.last_equal_step
        before = f" (all ranks were equal after step {equal_step})" if equal_step else ""
        if difference.is_round_off:
            if self._is_first_report("round-off", mark.layout):
                text = f"after step {mark.optimizer_step} {tensor} differs between ranks by less than 1e-5. "
                text += "Different devices or machines round differently. The difference may grow over many steps"
                self._notify("round-off", text)
            return None
        if not self._is_first_report("drift", mark.table_index, mark.layout):
            return None
        lines = [
            *_parties(difference, tensor, mark.optimizer_step, before),
            *_unequal_settings(difference.fingerprints),
        ]
        findings = [(s.rank, f) for s in ranks for f in s.findings if f.step <= mark.optimizer_step + 1]
        lines += [f"rank {rank} {_continued(finding)}" for rank, finding in findings if finding.kind == "swallowed"]
        stale = {rank: f"rank {rank} {f.text} (step {f.step})" for rank, f in findings if f.kind == "stale"}
        stale = stale if len(stale) < self._size else {}
        causes = difference.minority_ranks or tuple(sorted(stale))  # no majority: a stale step shows the wrong rank
        tie = () if causes else tuple(tuple(sorted(party)) for party in difference.rank_groups)
        return Diagnosis(DiagnosisKind.DIVERGED, causes, tie, (*lines, *stale.values()), step=mark.optimizer_step)

    def _diagnose_order(self, at: int, calls: Mapping[int, CallHashes]) -> Diagnosis | None:
        if ("order",) in self._reported:
            return None
        if any(call not in self._known.get(rank, {}) for rank, rank_calls in calls.items() for call in rank_calls):
            self._known = self._calls()
        known_ops = self._known
        windows = {rank: [known_ops.get(rank, {}).get(call, Op("", 0, "?")) for call in rank_calls]
                   for rank, rank_calls in calls.items()}  # fmt: skip
        agreed = {op.site for ops in known_ops.values() for call, op in ops.items() if call in self._orders.agreed}
        mismatch = find_order_mismatch(windows, frozenset(agreed - {""}))
        if mismatch is None:
            return None
        self._reported.add(("order",))
        return _order_diagnosis(mismatch, sorted(windows), at + 1)

    def _diagnose_uneven_ends(self, ranks: Sequence[RankSample]) -> Diagnosis | None:
        found = (mark for sample in ranks for mark in marks.parse_fingerprints(sample.fingerprints))
        ddp = any(mark.flags & marks.BY_DDP for mark in found)
        steps = {sample.rank: sample.joint_steps for sample in ranks}
        if len({*steps.values()}) < 2 or not self._is_first_report("uneven"):
            return None
        if not (ddp or self._comparison.has_synced_parameters):
            ordered = sorted(steps.values())
            for rank, step in steps.items():
                others = median_without(ordered, step)
                if 0 < step < MIN_STEP_FRACTION_WITHOUT_DDP * others:
                    text = f"rank {rank} took {step} steps, the others {others:g}. Check that its data is complete"
                    self._notify("few steps", text)
            return None
        parties = group_ranks_by_key(steps, lambda step: step)
        wrong = ranks_outside_majority(parties)
        lines = tuple(f"{format_ranks(party)} took {next(iter(party.values()))} steps" for party in reversed(parties))
        tie = () if wrong else tuple(tuple(sorted(party)) for party in parties)
        return Diagnosis(DiagnosisKind.DIVERGED, wrong, tie, lines, step=max(steps.values()))


def _findings(ranks: Sequence[RankSample], kind: str) -> dict[int, ScriptFault]:
    return {sample.rank: finding for sample in ranks for finding in sample.findings if finding.kind == kind}


def _continued(finding: ScriptFault) -> str:
    """For example "continued after ValueError in its forward, at train.py:7: ... (before step 5)"."""
    if finding.last:
        return f"swallowed {finding.text} (after step {finding.step}, its last)"
    return f"continued after {finding.text} (before step {finding.step})"


def _parties(difference: ReplicaDifference, tensor: str, step: int, before: str) -> list[str]:
    if difference.minority_ranks:
        others = [rank for rank in difference.fingerprints if rank not in difference.minority_ranks]
        return [f"{format_subject_verb(difference.minority_ranks, 'has', 'have')} a different {tensor} from "
                f"{format_ranks(others)} after step {step}{before}"]  # fmt: skip
    parties = " against ".join(format_ranks(party) for party in difference.rank_groups[:MOST_PARTIES])
    return [f"{tensor} differs after step {step}{before}: {parties}; without a majority, either may be wrong"]


def _unequal_settings(fingerprints: FingerprintsByRank) -> Iterator[str]:
    """Sentences about optimizer settings that differ between ranks. They are a cause even without a majority."""
    for n, name in enumerate(marks.SETTINGS):
        parties = group_ranks_by_key({rank: f"{mark.settings[n]:.7g}" for rank, mark in fingerprints.items()}, str)
        if len(parties) > 1:
            values = (f"{next(iter(party.values()))} on {format_ranks(party)}" for party in parties[:MOST_PARTIES])
            yield f"the optimizer's {name}, summed over parameter groups, is {' against '.join(values)}"


def _order_diagnosis(mismatch: CallMismatch, ranks: Sequence[int], number: int) -> Diagnosis:
    calls = dict(zip(ranks, mismatch.calls, strict=True))
    lines = (
        f"near call {number} over all ranks: {mismatch.words}",
        "calls in a different order mix values of the same shape without an error",
    )
    op = next((call for rank, call in calls.items() if rank not in mismatch.minority_ranks), None)
    site = next((call.site for rank, call in calls.items() if rank in mismatch.minority_ranks and call is not None), "")
    tie = () if mismatch.minority_ranks else tuple((rank,) for rank in ranks)
    return Diagnosis(DiagnosisKind.MISMATCH, mismatch.minority_ranks, tie, lines, op, site)


def calls_by_rank(evidence: Sequence[Evidence]) -> dict[int, dict[int, Op]]:
    return {sample.rank: {int(key): op for key, op in sample.calls.items() if key.isdecimal()} for sample in evidence}
