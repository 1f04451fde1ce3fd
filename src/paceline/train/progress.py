"""The progress of a run on this rank: the results of steps, the work between steps, and the end of the run.

`paceline train` and sessions both use it. Each passes in its data iteration, its evaluation, its printed lines, and the
values other than tensors that a checkpoint must contain (`numbers`).
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.shards import hash_tensors
from paceline.checkpoint.state import LockedRun, ResumePoint, TensorShard, TrainerState
from paceline.collectives.control import all_gather_object, check_equal, error_on_one_rank
from paceline.compute.flops import Utilization
from paceline.compute.resources import peak_resident_memory
from paceline.config.choices import CheckpointIntervals
from paceline.data.loader import MicroBatch
from paceline.data.plan import BatchPlan
from paceline.errors import ExitCode, PacelineError, TrainingError
from paceline.protocol.balance import AUTO
from paceline.protocol.control import WorkerSpec
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import PHASE_TIMES, PHASE_TIMES_OF_STEPS, REGROUPS, SAVES_ASKED, STEP
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.runs import events
from paceline.runs.folder import ADAPTER, WEIGHTS
from paceline.runs.progress import ThroughputMeter
from paceline.runs.summary import Summary, finite_metrics, write_summary
from paceline.runs.utilization import goodput
from paceline.runs.writing import remove
from paceline.stepping.nonfinite import NonFinitePolicy, SkippedSteps
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.totals import ControlFlags
from paceline.stepping.trained_model import ModelInTraining
from paceline.train.preemption import StopSignalHandler
from paceline.train.records import RunRecorder, StepTraces
from paceline.train.step_record import StepRecord

if TYPE_CHECKING:
    from paceline.train.checkpointing import CheckpointManager
    from paceline.train.streaming import GlobalBatchStream

CheckpointValues = Callable[[], dict[str, Any]]
"""Returns the values that a checkpoint contains in addition to tensors, metrics and the definition."""
USER_PHASES = (Phase.USER, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE)  # these run the user's code


class TrainingProgress(RunRecorder):
    """The state that the loop over steps shares with the work between steps."""

    def __init__(
        self, place: LockedRun | None, origin: ResumePoint | None, world: World, intervals: CheckpointIntervals,
        not_finite: NonFinitePolicy, show: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(place, world, show)
        self.origin, self._checkpoint_intervals = origin, intervals
        self._guard = HangGuard.of_process()
        self.order = CollectiveOrderCheck(
            world, self._guard.ledger.take_order_hash, self._guard.ledger.last_ordered_calls, self.say
        )
        self.request: StopSignalHandler | None = None
        self._skipped, self._not_finite = SkippedSteps(not_finite, world, self.say), not_finite
        self.throughput, self._traces = ThroughputMeter(), StepTraces(self._guard.page)
        self.use = Utilization(world)
        self._began, self._costs = time.perf_counter(), dict[str, Any]()
        self._checkpoints: CheckpointManager | None = None
        self._saves_seen = self._saves_done = 0  # user requests for a checkpoint: at the last vote, and handled
        self.stream: GlobalBatchStream | None = None
        """The training data, if they are a stream."""
        self.micro_batches: Sequence[MicroBatch] = ()
        """of this rank in the current step of a session or a stream"""
        self.is_open = False
        """Whether the run has a folder and `open_run` has claimed it."""
        self._restore(origin)
        self.start = self.step

    def _restore(self, origin: ResumePoint | None) -> None:
        content = origin.trainer_state if origin else TrainerState(0, {}, {})
        self.step, self.samples = origin.step if origin else 0, content.samples_seen
        self.metrics, self.evaluated = dict(content.metrics), content.evaluated

    def open_run(
        self, parts: Sequence[ModelInTraining], plan: BatchPlan, share: range, facts: Callable[[], dict[str, Any]],
        lines: Iterable[str] = (), *, of: str = "", listed: bool = False, report_to: str | None = None,
        others: Callable[[], list[TensorShard]] = list,
    ) -> None:  # fmt: skip
        """Claim the run folder, record the start of this rank and print `lines`, before the first step (collective).

        `facts` returns additional fields of the summary. `of` follows the step number of a resumed run, e.g. " of 400".
        With `listed`, the events contain the index of each sample. `report_to` names the trackers. `others` returns the
        tensors that are saved in addition to the models.
        """
        self._plan, self._share, self._facts, self._listed = plan, share, facts, listed
        self.use.devices *= len(getattr(parts[0].replica.module, "device_ids", None) or [0])  # several: DataParallel
        self._replicas, self._adapters = [part.replica for part in parts], [part.adapters for part in parts]
        if (location := self.place) is None:
            return
        # Many sessions have no run folder. `weights` is needed at the end, when an error may prevent an import.
        from paceline.checkpoint.export import state_dict_names_by_saved_name
        from paceline.train import checkpointing, weights

        self._weight_files = weights
        self._names = [
            r.pipeline.names if r.pipeline else state_dict_names_by_saved_name(r.model) for r in self._replicas
        ]
        self._guard.page.put("virtual_ranks", plan.virtual_ranks)
        self._guard.page.put("own_virtual_ranks", len(share))
        holder = checkpointing.CheckpointedModels(parts, self._world, plan.virtual_ranks, others)
        self._checkpoints = checkpointing.CheckpointManager(
            holder, location, self.origin, self._checkpoint_intervals,
            writer=self.open_writers(location, report_to), say=self.say, enter=self._guard.page.enter,
        )  # fmt: skip
        self.log_start(plan, self.step)
        for line in [*location.notices, *lines]:
            self.say(line)
        if self._not_finite == "rollback" and not self._checkpoints.can_roll_back:
            self.say("WARNING: --not-finite rollback has no older state to return to. Add --checkpoint-every STEPS")
        self.is_open = True
        if self.origin:
            self.say(f"resumes after step {self.step}{of}, from {self.origin.location_text}")

    # between steps

    def votes(self, *, end: float = 0.0) -> ControlFlags:
        """This rank's votes in the next step: on the pending checkpoint, on a stop, and on a requested save."""
        requests, checkpoints = self._guard.page.steps, self._checkpoints
        if self.is_open and self._plan.own_order and self.micro_batches:
            self.log_sample_indices(self.step + 1, self.micro_batches)
        self._saves_seen = requests[SAVES_ASKED]
        stop = float((self.request is not None and bool(self.request.by)) or requests[REGROUPS] > 0)
        written, failed, due = (0.0, 0.0, 0.0) if checkpoints is None else checkpoints.votes()
        save = float(self._saves_seen > self._saves_done)
        samples = 0.0 if self.stream is None else self.stream.next_batch_samples
        return ControlFlags(stop, written, failed, due, end, save, samples)

    def record_step(self, record: StepRecord, samples: int, *, tracked: bool) -> None:
        page, seconds = self._guard.page, record.phase_seconds
        self.step, self.samples = record.step, self.samples + samples
        page.steps[STEP] = self.step
        page.enter(Phase.CHECKPOINT)  # from here on the step is complete, even if an error follows
        page.words[PHASE_TIMES_OF_STEPS] = page.words[PHASE_TIMES]
        self.throughput.count_step(samples, seconds.get(Phase.DATA.word, 0.0), sum(seconds.values()))
        tokens, own_samples = record.num_tokens_and_samples()
        self.use.tokens, self.use.samples = self.use.tokens + tokens, self.use.samples + own_samples
        if tracked or self.is_open:
            self.log_step(record, samples, self._share, listed=self._listed, tracked=tracked)
        if self.is_open:
            is_first = self.step == self.start + 1
            self.write_optional(self._traces.take_due(record, self._replicas if is_first else ()))
            if self._world.rank == 0 and is_first and (flops := self.use.count.per_sample):
                self.write_optional([events.FlopsCounted(flops, self.use.devices, self.use.peak_tflops())])
            if is_first and (spec := WorkerSpec.from_environment()) is not None and spec.balance == AUTO:
                from paceline.train.memory import max_virtual_ranks  # most runs do not need it

                page.put("max_virtual_ranks", max_virtual_ranks(self._replicas, self._world, self._plan.virtual_ranks))

    def rollback_point(self, record: StepRecord) -> ResumePoint | None:
        """The older state to restore if the step was skipped and the policy is `rollback` (then collective)."""
        skipped = record.result.skip_cause
        if skipped is None or not self._skipped.record_skip(self.step, skipped) or record.result.votes.stop:
            return None
        if self._checkpoints is None or (origin := self._checkpoints.newest_resume_point()) is None:
            self.say(f"step {self.step} is skipped: no older state exists yet")
            return None
        return origin

    def roll_back(self, origin: ResumePoint) -> None:
        self.write(events.RolledBack(self.step, origin.step))
        self._listed_step = 0
        self.say(f"rolls back from step {self.step} to {origin.location_text}")
        self._restore(origin)
        self._guard.page.set_step(self.step)

    def is_due(self, step: int) -> bool:
        """Whether `save_if_due` looks at the state after `step`, without any vote."""
        return self._checkpoints is not None and self._checkpoints.is_due(step)

    def save_if_due(self, votes: ControlFlags, numbers: CheckpointValues, *, save: bool, wait: bool) -> None:
        """Compare, snapshot and save as due; with `wait`, return when the checkpoint is on disk (collective)."""
        if self._checkpoints is not None:
            if votes.save > 0:
                self._saves_done, save = self._saves_seen, True
            content = partial(self._content, numbers)
            self.throughput.exclude_pause(self._checkpoints.after_step(self.step, votes, content, save=save))
            if wait:
                self.throughput.exclude_pause(self._checkpoints.wait())

    def save_before_stop(self, numbers: CheckpointValues) -> None:
        """Save the state after the last step, unless this start has resumed from it (collective)."""
        if self.step > self.start:
            self.save_if_due(ControlFlags(), numbers, save=True, wait=True)

    def _content(self, numbers: CheckpointValues) -> TrainerState:
        definition = self.place.definition if self.place else {}
        return TrainerState(
            self.samples, finite_metrics(self.metrics), definition, self.evaluated, numbers(), self._names
        )

    # the end

    def save_after_failure(
        self, error: BaseException, numbers: CheckpointValues, *, is_state_consistent: bool
    ) -> PacelineError | None:
        """Save the state after the last step when `error` ends the run, without any collective.

        Nothing is saved in the middle of an update. Returns the error to raise instead, if there is one: the guard's
        error, if it aborted a collective; or an error that names the file of the rescued weights, if another file could
        not be written.
        """
        phase, has_steps = self._guard.page.get("phase"), self.step > self.start
        stall_error = None if isinstance(error, PacelineError) else self._guard.stall_error(error)
        if self._checkpoints is None or self.place is None or not is_state_consistent:
            return stall_error
        if has_steps and phase != Phase.CLOSE:
            self._checkpoints.save_after_error(error, self.step, partial(self._content, numbers))
        if stall_error is not None or not isinstance(error, OSError) or phase in USER_PHASES:
            return stall_error
        save_weights = self._weight_files.save_weights_on_one_rank
        where = save_weights(self._replicas[0], self.place.folder) if has_steps else "nothing was trained"
        return TrainingError(code="rank-failed", rank=self._world.rank, step=self.step, reason=str(error), where=where)

    def finish(
        self, stopped: bool, lines: Callable[[Summary], list[str]], saved: Callable[[], object] = lambda: None
    ) -> ExitCode:
        """Save the weights, write the summary and print the result, `lines` (collective).

        With `stopped` (on request), the weights are not saved. `saved` is called after the weights are saved.
        """
        assert self._checkpoints is not None
        assert self.place is not None
        self._checkpoints.end()
        self._costs, self.slowest_data_rank = max_costs_over_ranks(self.throughput.data_fraction(), self._world)
        self.write(events.Ended(self.step, time.time()))
        self._guard.page.enter(Phase.CLOSE)
        failure, is_first_rank = self._checkpoints.failed, self._world.rank == 0
        if stopped and failure:
            weights, save_weights = self._replicas[0].weights(), self._weight_files.save_with_fallback_folders
            failure += f"; {save_weights(weights, self.place.folder)}" if is_first_rank else ""
            raise error_on_one_rank(TrainingError(code="stopped-unsaved", step=self.step, reason=failure), self._world)
        fields: dict[str, Any] = {}
        if not stopped:
            fields = {"weights_sha256": self._save_weights(self.place), "seconds": time.perf_counter() - self._began}
            saved()
            if is_first_rank:  # no other rank waits for this rank any more
                self.use.peak_tflops(measure=True, samples_per_second=self.throughput.overall_rate())
        code = ExitCode.SAVED if stopped else ExitCode.DONE
        regroups = stopped and self._guard.page.get_request("regroups")  # the launcher restarts the run immediately
        if is_first_rank and not regroups:
            for line in lines(self.summarise(code, **fields)):
                self.show(line)
        if failure:
            raise error_on_one_rank(TrainingError(code="last-checkpoint-unsaved", reason=failure), self._world)
        return code

    def _save_weights(self, location: LockedRun) -> str:
        digests: list[str] = []
        for number, (replica, adapters) in enumerate(zip(self._replicas, self._adapters, strict=True), 1):
            with replica.use_merged_buffers():
                weights = replica.weights(
                    adapters and adapters.weight_names
                )  # a rank may have no memory for frozen weights
                if adapters is not None and adapters.unsaved_tensors(weights):
                    adapters, weights = None, replica.weights()
                digests.append(hash_tensors(weights))
                check_equal("final weights", digests[-1], self._world, error=TrainingError)
                file = location.folder / (f"model-{number}.safetensors" if number > 1 else WEIGHTS)
                folder = location.folder / (f"{ADAPTER}-{number}" if number > 1 else ADAPTER)
                if self._world.rank == 0:
                    self._weight_files.save(weights, file) if adapters is None else adapters.write(folder, weights)
                    if os.path.lexists(old := folder if adapters is None else file):
                        remove(old)  # of an earlier end of this run
        return digests[0]

    def summarise(self, code: int, **known: Any) -> Summary:
        """Write the summary with the additional fields `known`. Only rank 0 calls it."""
        assert self.place is not None
        plan, use, speed = (
            self._plan,
            self.use,
            dict[str, Any](self.use.throughput_metrics(self.throughput.overall_rate())),
        )
        if flops := use.count.per_sample:
            speed |= {"flops_per_sample": flops, "devices": use.devices, "peak_tflops": use.peak_tflops() or None}
        summary = Summary(
            exit=int(code), world_size=self._world.size, virtual_ranks=plan.virtual_ranks, steps=self.step,
            epochs=self.step / plan.known_steps_per_epoch if plan.known_steps_per_epoch else None,
            samples_seen=self.samples, goodput=goodput(self.place.folder, time.time()), global_batch=plan.global_batch,
            threads_per_rank=torch.get_num_threads(), **speed, **self._costs, **self._facts(), **known,
        )  # fmt: skip
        write_summary(self.place.folder, summary)
        return summary

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.join_threads()
        if self.is_open:
            self.write_optional(self._traces.take_remaining())
        super().close()


def max_costs_over_ranks(data_share: float | None, world: World) -> tuple[dict[str, Any], int]:
    """The maximum of each cost over all ranks, and the rank that waited most for its data (collective)."""
    gpu = torch.accelerator.max_memory_allocated(world.device) if world.device.type != "cpu" else 0
    local = [data_share or 0.0, peak_resident_memory(), gpu]
    fractions, peaks, gpu_peaks = zip(*all_gather_object(local, world), strict=True)
    largest = max(fractions)
    costs = {"peak_memory_bytes": max(peaks) or None, "peak_gpu_memory_bytes": max(gpu_peaks) or None}
    return {"data_share": None if data_share is None else round(largest, 4), **costs}, fractions.index(largest)
