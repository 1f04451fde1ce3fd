"""Checks of each host (it answers, software, cores, limits, GPUs, clock), and of what a training needs on all."""

from collections.abc import Iterator, Sequence
from statistics import median, median_low

from paceline.doctor.check import Check, checked, duration, listed, rate, size
from paceline.doctor.survey import Survey
from paceline.errors import plural
from paceline.host.compare import Finding, differences, differing, shares
from paceline.host.facts import Address

MAX_CLOCK_OFFSET_SECONDS = 2.0
LEAST_OFFSET_SECONDS = 1e-3  # finer is of no use
SLOW_GPU = 1.25  # times what the others take
BUSY_BYTES = 1 << 30  # of a GPU's memory in use: more than a driver and a desktop need

LITTLE_ROOM_BYTES = 1 << 30
NO_ROOM_BYTES = 64 << 20
BYTES_PER_PARAMETER = 12  # of a checkpoint: weights and two moments of AdamW in float32
CHECKPOINTS = 4  # the three that are kept and the one that is being written
LARGE_SHARE = 0.5  # of a step, from which on the network decides how fast a run is


def logins(survey: Survey) -> Check:
    """Every host answers."""
    findings = [Finding("error", host, why, "fix that, or leave this host out") for host, why in survey.lost.items()]
    findings += _twice(survey)
    answering = [host for host in survey.wanted.hosts if host not in survey.lost]
    summary = f"{listed(answering)} answer{'s' if len(answering) == 1 else ''}" if answering else "no host answers"
    return checked("hosts", summary, findings)


def _twice(survey: Survey) -> Iterator[Finding]:
    """Two names for one machine: its cores, GPUs and network would be counted twice."""
    seen: dict[tuple[str, tuple[Address, ...]], str] = {}
    for name, one in survey.facts.items():
        first = seen.setdefault((one.host, one.addresses), name)
        if first != name:
            yield Finding("warning", name, f"is the same machine as {first} ({one.host})", "name each machine once")


def software(survey: Survey) -> Check:
    """All run the same software."""
    facts = next(iter(survey.facts.values()))
    versions = ", ".join(f"{name} {version}" for name, version in facts.packages.items() if name != "msgspec")
    return checked("software", f"Python {facts.python}, {versions}", differences(survey.facts))


def resources(survey: Survey) -> Check:
    """Each host can bear its share of the workers."""
    workers = dict(zip(survey.wanted.hosts, survey.wanted.workers, strict=True))
    threads = survey.wanted.threads
    told = {
        f"{plural(workers[name], 'worker')} x {plural(threads or max(1, one.cores // workers[name]), 'thread')} "
        f"on {plural(one.cores, 'core')}"
        for name, one in survey.facts.items()
    }
    return checked("resources", "; ".join(sorted(told)), shares(survey.facts, workers, threads))


def cards(survey: Survey) -> str:
    """The GPUs of each host, and how they are joined."""
    told: list[str] = []
    for name, one in survey.facts.items():
        links = sorted({link for gpu in one.gpus for link in gpu.links} - {"-"})
        joined = f" joined by {', '.join(links)}" if links else ""
        told.append(f"{name}: {len(one.gpus)} x {one.gpus[0].name}{joined}" if one.gpus else f"{name}: none")
    return "; ".join(told)


def gpus(survey: Survey) -> Iterator[Finding]:
    """There are enough GPUs, free and whole."""
    for name, workers in zip(survey.wanted.hosts, survey.wanted.workers, strict=True):
        cards = survey.facts[name].gpus if name in survey.facts else ()
        if cards and workers > len(cards):
            what, fewer = f"{workers} workers, but {len(cards)} GPUs", f"use --nproc {len(cards)}"
            yield Finding("error", name, what, f"{fewer}, or --backend gloo or --device cpu when you train")
        for gpu in cards:
            if gpu.lost:
                words = f"GPU {gpu.index} does not answer: {gpu.lost}"
                yield Finding("error", name, words, "restart the machine, or leave it out with CUDA_VISIBLE_DEVICES")
            who = f" by {listed(f'pid {pid}' for pid in gpu.processes)}" if gpu.processes else ""
            if gpu.processes or gpu.memory_used > max(BUSY_BYTES, gpu.memory // 20):
                what = f"GPU {gpu.index} is in use{who}: {gpu.memory_used >> 20} of {gpu.memory >> 20} MiB"
                yield Finding("warning", name, what, "wait for it, or choose others with CUDA_VISIBLE_DEVICES")
            if gpu.ecc_errors:
                what = f"GPU {gpu.index} has had {gpu.ecc_errors} memory errors that could not be corrected"
                yield Finding("error", name, what, "reset or replace it (nvidia-smi -q -d ECC,PAGE_RETIREMENT)")


STRANGERS = (
    "only agents that know the run's secret reach its store. Gradients between hosts are not encrypted: torch's gloo "
    "is built without TLS, NCCL has none. Where others can read or forge packets use a network of your own: WireGuard, "
    "VLAN"
)


def clocks(survey: Survey) -> Check:
    """The clocks agree. This machine's is a witness too, so that of two hosts the wrong one is named."""
    offsets = survey.clock_offsets
    if not offsets:
        return Check("clocks", "not compared: no host has answered", done=False)
    middle = median([*offsets.values(), 0.0])
    wrong = {host: offset - middle for host, offset in offsets.items()}
    findings = [
        Finding(
            "warning",
            host,
            f"its clock is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}: logs and file times mislead, "
            "and torchrun's own rendezvous can take half a job for a whole one",
            "synchronise it: timedatectl set-ntp true, or chronyc makestep",
        )
        for host, offset in wrong.items()
        if abs(offset) > MAX_CLOCK_OFFSET_SECONDS
    ]
    return checked("clocks", f"all within {duration(max(LEAST_OFFSET_SECONDS, *map(abs, wrong.values())))}", findings)


def run_folder(survey: Survey) -> Iterator[Finding]:
    """All hosts see one folder, and it can be written to."""
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
    if survey.wanted.data_dir is None:
        return Check("data", "not compared: only the task knows where they are", done=False)
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


def _slow_gpus(survey: Survey, seconds: Sequence[float]) -> Iterator[Finding]:
    """GPUs that take much longer for the same step than the others do."""
    wanted = survey.wanted
    hosts = [name for name, workers in zip(wanted.hosts, wanted.workers, strict=True) for _ in range(workers)]
    for rank, (host, own) in enumerate(zip(hosts, seconds, strict=False)):
        if own > SLOW_GPU * (usual := median_low(seconds)):
            what = f"the GPU of rank {rank} takes {duration(own)} for a step, others {duration(usual)}"
            yield Finding("warning", host, what, "see whether it is hot, or shared (nvidia-smi -q -d PERFORMANCE)")


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
    told += f" ({rate(found.bytes_per_second)}, on {found.device})"
    findings = [*_slow_gpus(survey, found.step_seconds_of)] if found.device != "cpu" else []
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


def mesh_layout(survey: Survey) -> Check:
    """Ranks that share layers, and so talk in each of them, share a host."""
    mesh = survey.wanted.mesh
    assert mesh is not None
    hosts = [name for name, count in zip(survey.wanted.hosts, survey.wanted.workers, strict=True) for _ in range(count)]
    groups = sorted({mesh.peers(rank, ("tensor",)) for rank in range(mesh.size)})
    apart = [(ranks, sorted({hosts[rank] for rank in ranks})) for ranks in groups]
    crossing = [(ranks, on) for ranks, on in apart if len(on) > 1]
    inside = "; ranks along tensor share a host" if mesh.of("tensor") > 1 else ""
    return checked("mesh", f"{mesh}{inside}", [_crossing(survey, ranks, on) for ranks, on in crossing[:1]])


def _crossing(survey: Survey, ranks: Sequence[int], on: Sequence[str]) -> Finding:
    """What it costs that `ranks` share layers from several hosts."""
    found, links = survey.rehearsed, [one for pair, one in survey.links.items() if {*pair} <= {*on}]
    what = f"ranks {', '.join(map(str, ranks))} share layers along tensor"
    if found is not None and found.tensor_bytes:
        ring = 2 * (len(ranks) - 1) / len(ranks) * found.tensor_bytes
        what += f", and each sends {size(ring)} of sums in a step"
        if slowest := min((one.bytes_per_second for one in links), default=0.0):
            what += f": at least {duration(ring / slowest)} at {rate(slowest)}, beside {duration(found.step_seconds)}"
    remedy = (
        f"let tensor divide the {plural(min(survey.wanted.workers), 'worker')} of a host, and use data or pipeline "
        "between hosts"
    )
    return Finding("warning", listed(on), what, remedy)
