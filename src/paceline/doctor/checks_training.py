"""Checks of what a training needs: a shared folder with room, the same data, and a network that is fast enough."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.check import Check, checked, duration, listed, rate, size
from paceline.doctor.survey import Survey
from paceline.host.compare import Finding, differing

LITTLE_ROOM_BYTES = 1 << 30
NO_ROOM_BYTES = 64 << 20
BYTES_PER_PARAMETER = 12  # of a checkpoint: weights and two moments of AdamW in float32
CHECKPOINTS = 4  # the three that are kept and the one that is being written
LARGE_SHARE = 0.5  # of a step, from which on the network decides how fast a run is


def run_folder(survey: Survey) -> Check:
    """All hosts see one folder, and it can be written to."""
    folder, several = survey.wanted.run_dir, len(survey.wanted.hosts) > 1
    summary = f"{folder} can be written to" + (", and all hosts see it" if several else "")
    return checked("run folder", summary, _run_folder(survey))


def _run_folder(survey: Survey) -> Iterator[Finding]:
    writer = next(iter(survey.facts))
    if survey.written is None:
        return  # the host is lost, which is reported already
    if not survey.written.ok:
        yield Finding("error", writer, survey.written.why, "choose another --run-dir, or make it writable")
        return
    for host, seen in survey.seen.items():
        if not seen.ok:
            what = f"does not see what {writer} writes to {survey.wanted.run_dir}: {seen.why}"
            yield Finding("error", host, what, "choose a --run-dir on a file system that all hosts mount (NFS, Lustre)")


def disk_room(survey: Survey) -> Check:
    """There is room for logs and checkpoints."""
    free = {host: disk.free for host, disk in survey.disks.items() if not disk.why}
    least = f"at least {size(min(free.values()))} free" if free else "not known"
    return checked("disk", least, _room(survey))


def _room(survey: Survey) -> Iterator[Finding]:
    parameters = survey.rehearsed.parameters if survey.rehearsed and survey.wanted.task else 0
    needed = CHECKPOINTS * BYTES_PER_PARAMETER * parameters
    for host, disk in survey.disks.items():
        remedy = "delete what is not needed, or choose another --run-dir"
        if disk.why:
            yield Finding("error", host, f"{disk.path}: {disk.why}", "choose another --run-dir")
        elif disk.free < max(NO_ROOM_BYTES, needed):
            why = f", {CHECKPOINTS} checkpoints of this task take {size(needed)}" if needed > NO_ROOM_BYTES else ""
            what = f"only {size(disk.free)} free of {size(disk.total)} at {disk.path}{why}"
            yield Finding("error", host, what, remedy)
        elif disk.free < LITTLE_ROOM_BYTES:
            yield Finding("warning", host, f"only {size(disk.free)} free of {size(disk.total)} at {disk.path}", remedy)


def data(survey: Survey) -> Check:
    """The data is the same everywhere."""
    where = survey.wanted.data_dir or "the packaged MNIST"
    total = max((sum(file.size for file in answer.files) for answer in survey.files.values()), default=0)
    same = "the same on all hosts: " if len(survey.wanted.hosts) > 1 else ""
    return checked("data", f"{same}{where}, {size(total)}", _data(survey))


def _data(survey: Survey) -> Iterator[Finding]:
    remedy = "copy the data from a host that has it right, or use a folder that all share"
    for host, answer in survey.files.items():
        if answer.why:
            yield Finding("error", host, f"the data cannot be read: {answer.why}", remedy)
    readable = {host: answer for host, answer in survey.files.items() if not answer.why}
    for name in sorted({file.name for answer in readable.values() for file in answer.files}):
        found = {host: next((f for f in answer.files if f.name == name), None) for host, answer in readable.items()}
        told = {host: f"{f.size} bytes, SHA-256 {f.sha256[:12]}" if f else "missing" for host, f in found.items()}
        yield from differing("error", name, told, remedy)


def gradients(survey: Survey) -> Check:
    """What the sum of the gradients over all ranks takes, and how much of a step that is."""
    found = survey.rehearsed
    if found is None:
        return Check("all-reduce", "not measured: not all hosts answer and reach each other", done=False)
    if found.why:
        remedy = "fix what is reported above; if that is nothing, train on one host first"
        return checked("all-reduce", "", [Finding("error", listed(survey.wanted.hosts), found.why, remedy)])
    ranks = sum(survey.wanted.workers)
    what = "gradients" if survey.wanted.task else "vectors"
    told = f"{what} of {size(found.gradient_bytes)} take {duration(found.reduce_seconds)} over {ranks} ranks"
    told += f" ({rate(found.bytes_per_second)})"
    findings: list[Finding] = []
    if found.step_seconds and ranks > 1:
        share = found.reduce_seconds / (found.reduce_seconds + found.step_seconds)
        told += (
            f" per step: at most {share:.0%} of a step, whose other part takes {duration(found.step_seconds)} "
            f"with {survey.wanted.batch_size} samples a rank"
        )
        if share > LARGE_SHARE:
            remedy = "a larger --batch-size or --accumulation, fewer ranks, or a faster network (see links)"
            findings.append(Finding("warning", listed(survey.wanted.hosts), told, remedy))
    return checked("all-reduce", told, findings)
