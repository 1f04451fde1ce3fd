"""The course of a run on this rank: what its steps leave behind, what is due between two of them, and how it ends.

`paceline train` and sessions have the same one. What differs between them is handed in: who goes through the data, what
is evaluated, which lines are said, and what a checkpoint keeps beside tensors (`numbers`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline.checkpoint.export import state_names
from paceline.checkpoint.resume import ResumePoint, RunLocation, TrainerState
from paceline.checkpoint.shards import sha256_of
from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import check_equal, told_once
from paceline.compute.flops import Utilization
from paceline.data.plan import BatchPlan
from paceline.errors import ExitCode, PacelineError, TrainingError
from paceline.protocol.evidence import Phase
from paceline.rank.guard import Guard
from paceline.rank.world import World
from paceline.runs import events
from paceline.runs.folder import WEIGHTS
from paceline.runs.progress import Throughput
from paceline.runs.summary import Summary, finite, write_summary
from paceline.runs.utilization import goodput
from paceline.stepping.nonfinite import LeftOut, Policy
from paceline.stepping.order import CallOrder
from paceline.stepping.totals import Votes
from paceline.stepping.trained_model import TrainedModel
from paceline.train.checkpointing import Keeping, Rhythm, StateCollection
from paceline.train.costs import Waiting, all_costs
from paceline.train.fit import StepRecord
from paceline.train.preemption import StopRequest
from paceline.train.records import Records, Traces
from paceline.train.weights import rescue, rescue_alone, save

Numbers = Callable[[], dict[str, Any]]
"""Gives what a checkpoint keeps beside tensors, metrics and the definition."""
NOT_OURS = (Phase.USER, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE)  # phases of the user's own code


class Course(Records):
    """The state that the loop over steps shares with what is done between them."""

    def __init__(
        self,
        place: RunLocation | None,
        origin: ResumePoint | None,
        world: World,
        rhythm: Rhythm,
        not_finite: Policy,
        show: Callable[[str], None],
    ) -> None:
        """The state to resume from is `origin`'s; `show` as in Records."""
        super().__init__(place, world, show)
        self.origin, self._rhythm = origin, rhythm
        self._guard = Guard.of_process()
        self.order = CallOrder(world, self._guard.ledger.take_order, self._guard.ledger.taken, self.say)
        self.request: StopRequest | None = None
        self._left_out, self._policy = LeftOut(not_finite, world, self.say), not_finite
        self.throughput, self._waiting, self._traces = Throughput(), Waiting(), Traces(self._guard.box)
        self.use = Utilization(world)
        self._began, self._costs = time.perf_counter(), dict[str, Any]()
        self._keeping: Keeping | None = None
        self._saves_seen = self._saves_done = 0  # asked for by people: when it voted last, and dealt with
        self.is_open = False
        """whether there is a folder, and it is taken"""
        self._take(origin)
        self.start = self.step

    def _take(self, origin: ResumePoint | None) -> None:
        content = origin.content if origin else TrainerState(0, {}, {})
        self.step, self.samples = origin.step if origin else 0, content.samples_seen
        self.metrics, self.evaluated = dict(content.metrics), content.evaluated

    def open(
        self, parts: Sequence[TrainedModel], plan: BatchPlan, share: range, facts: Callable[[], dict[str, Any]],
        lines: Iterable[str] = (), *, of: str = "", listed: bool = False, track: str | None = None,
        others: Callable[[], list[TensorShard]] = list,
    ) -> None:  # fmt: skip
        """The first step is near: take the folder, and say that this rank begins (a collective).

        `parts` are the models; `facts`: what the summary says beside what is known here; `lines` are said, with the
        number of steps `of` the run where it goes on; `listed`: each sample is written down; `track`: which trackers;
        `others`: the tensors of what is saved beside the models.

        Raises:
            UsageError: on one rank, if the run's files cannot be written; ReportedByPeer on the others.
        """
        self._plan, self._share, self._facts, self._listed = plan, share, facts, listed
        self.use.devices *= len(getattr(parts[0].replica.module, "device_ids", None) or [0])  # several: DataParallel
        self._replicas, holder = (
            [part.replica for part in parts],
            StateCollection(parts, self._world, plan.virtual_ranks, others),
        )
        if (place := self.place) is None:
            return
        self._names = [one.pipeline.names if one.pipeline else state_names(one.model) for one in self._replicas]
        writer, enter = self.begin(place, track), self._guard.box.enter
        self._keeping = Keeping(holder, place, self.origin, self._rhythm, writer=writer, say=self.say, enter=enter)
        self.started(plan, self.step)
        for line in [*place.notices, *lines]:
            self.say(line)
        if self._policy == "rollback" and not self._keeping.can_go_back:
            self.say("WARNING: --not-finite rollback has nothing to go back to: give --checkpoint-every STEPS")
        self.is_open = True
        if self.origin:
            self.say(f"goes on after step {self.step}{of}, from {self.origin.where}")

    # between two steps

    def votes(self, *, end: float = 0.0, coming: float = 0.0) -> Votes:
        """What this rank has to say in the next step: on the checkpoint on its way, and whether it is asked to stop.

        `end` and `coming` as in Votes.
        """
        asked, keeping = self._guard.box.asked, self._keeping
        self._saves_seen = asked("saves_asked")
        stop = float((self.request is not None and bool(self.request.by)) or asked("regroups") > 0)
        written, failed, due = (0.0, 0.0, 0.0) if keeping is None else keeping.votes()
        return Votes(stop, written, failed, due, end, float(self._saves_seen > self._saves_done), coming)

    def note(self, record: StepRecord, samples: int, *, tracked: bool) -> None:
        """A step on a global batch of `samples` samples has ended; `tracked`: trackers are told of it."""
        self._guard.box.enter(Phase.CHECKPOINT)  # the step is whole, whatever happens now
        self.step, self.samples = record.step, self.samples + samples
        self._guard.box.set_step(self.step)
        self.throughput.step(samples)
        self.use.add(record.consumed)
        self._waiting.step(record.data_seconds, record.seconds)
        self.stepped(record, samples, self._share, listed=self._listed, tracked=tracked)
        if self.is_open:
            self.in_detail(self._traces.of(record, self._replicas if self.step == self.start + 1 else ()))
            if self._world.rank == 0 and self.step == self.start + 1 and (flops := self.use.count.per_sample):
                self.in_detail([events.Counted(flops, self.use.devices, self.use.peak_tflops())])

    def back(self, record: StepRecord) -> ResumePoint | None:
        """The older state to go on from, if the step was left out and that is the policy (a collective then).

        Raises:
            TrainingError: too many steps were left out.
        """
        found = record.result.left_out
        if found is None or not self._left_out.goes_back(self.step, found) or record.result.votes.stop:
            return None
        if self._keeping is None or (origin := self._keeping.newest()) is None:
            self.say(f"step {self.step} is left out: nothing is kept yet to go back to")
            return None
        return origin

    def go_back(self, origin: ResumePoint) -> None:
        """The models are those of `origin` again."""
        self.write(events.RolledBack(self.step, origin.step))
        self.say(f"goes back from step {self.step} to {origin.where}")
        self._take(origin)
        self._guard.box.set_step(self.step)

    def between(self, votes: Votes, numbers: Numbers, *, save: bool, settled: bool) -> None:
        """Do what is due after the step; `settled`: it is on disk before anything else is done (a collective)."""
        if self._keeping is not None:
            if votes.save > 0:
                self._saves_done, save = self._saves_seen, True
            self.throughput.pause(self._keeping.between(self.step, votes, lambda: self._content(numbers), save=save))
            if settled:
                self.throughput.pause(self._keeping.settle())

    def _content(self, numbers: Numbers) -> TrainerState:
        definition = self.place.definition if self.place else {}
        return TrainerState(self.samples, finite(self.metrics), definition, self.evaluated, numbers(), self._names)

    # the end

    def fail(self, error: BaseException, numbers: Numbers, *, whole: bool) -> PacelineError | None:
        """After an error: save what there is, the state after the last step if that is `whole` (no collective).

        Returns:
            What to raise in its place: it is the guard's doing; or a file cannot be written, and where the weights are.
        """
        phase, new = self._guard.box.get("phase"), self.step > self.start
        stalled = None if isinstance(error, PacelineError) else self._guard.stall_error(error)
        if self._keeping is None or self.place is None or not whole:
            return stalled
        if new and phase != Phase.CLOSE:
            self._keeping.save_after(error, self.step, lambda: self._content(numbers))
        if stalled is not None or not isinstance(error, OSError) or phase in NOT_OURS:
            return stalled
        where = rescue_alone(self._replicas[0], self.place.folder) if new else "nothing was trained yet"
        return TrainingError(code="rank-failed", rank=self._world.rank, step=self.step, reason=str(error), where=where)

    def finish(
        self, stopped: bool, lines: Callable[[Summary], list[str]], saved: Callable[[], object] = lambda: None
    ) -> ExitCode:
        """The loop is over, or was `stopped`: save, summarise, and say how it ended in `lines` (a collective).

        `saved` is called when the weights are on disk.

        Raises:
            TrainingError: the last checkpoint could not be written, or a rank's weights differ.
        """
        assert self._keeping is not None
        assert self.place is not None
        self._keeping.end()
        self._costs, self.waited = all_costs(self._waiting, self._world)
        self.write(events.Ended(self.step, time.time()))
        self._guard.box.enter(Phase.CLOSE)
        failed, first = self._keeping.failed, self._world.rank == 0
        if stopped and failed:
            weights = self._replicas[0].weights()
            failed += f"; {rescue(weights, self.place.folder)}" if first else ""
            raise told_once(TrainingError(code="stopped-unsaved", step=self.step, reason=failed), self._world)
        known: dict[str, Any] = {}
        if not stopped:
            known = {"weights_sha256": self._save_weights(self.place), "seconds": time.perf_counter() - self._began}
            saved()
            if first:  # nobody waits for this rank now
                self.use.peak_tflops(measure=True, samples_per_second=self.throughput.overall())
        code = ExitCode.SAVED if stopped else ExitCode.DONE
        if first and not (stopped and self._guard.box.asked("regroups")):  # then the run goes on at once
            for line in lines(self.summarise(code, **known)):
                self.show(line)
        if failed:
            raise told_once(TrainingError(code="last-checkpoint-unsaved", reason=failed), self._world)
        return code

    def _save_weights(self, place: RunLocation) -> str:
        """Of all models; the digest of the first."""
        digests: list[str] = []
        for number, replica in enumerate(self._replicas, 1):
            with replica.merged_buffers():
                weights = replica.weights()
                digests.append(sha256_of(weights))
                # A rank whose weights differ has not computed this run.
                check_equal("final weights", digests[-1], self._world, error=TrainingError)
                if self._world.rank == 0:
                    save(weights, place.folder / (f"model-{number}.safetensors" if number > 1 else WEIGHTS))
        return digests[0]

    def summarise(self, code: int, **known: Any) -> Summary:
        """Write the summary, with what is `known` beside the facts; on rank 0."""
        assert self.place is not None
        plan, use, speed = self._plan, self.use, dict[str, Any](self.use.speed(self.throughput.overall()))
        if flops := use.count.per_sample:
            speed |= {"flops_per_sample": flops, "devices": use.devices, "peak_tflops": use.peak_tflops() or None}
        summary = Summary(
            exit=int(code), world_size=self._world.size, virtual_ranks=plan.virtual_ranks, steps=self.step,
            global_batch=plan.global_batch, epochs=self.step / plan.known_steps if plan.known_steps else None,
            samples_seen=self.samples, goodput=goodput(self.place.folder, time.time()),
            threads_per_rank=torch.get_num_threads(), **speed, **self._costs, **self._facts(), **known,
        )  # fmt: skip
        write_summary(self.place.folder, summary)
        return summary

    def close(self) -> None:
        """Wait for threads and let go of the files; a checkpoint not published by now never will be."""
        if self._keeping is not None:
            self._keeping.abandon()
        if self.is_open:
            self.in_detail(self._traces.rest())
        super().close()
