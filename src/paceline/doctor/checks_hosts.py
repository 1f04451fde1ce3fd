"""Checks of each host: that it answers, its software, cores, limits, GPUs and clock."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from paceline.doctor.check import Check, checked, counted, duration, listed
from paceline.doctor.survey import Survey
from paceline.host.compare import Finding, differences, shares
from paceline.host.facts import Address

MAX_CLOCK_OFFSET_SECONDS = 2.0
LEAST_OFFSET_SECONDS = 1e-3  # finer is of no use
BUSY_BYTES = 1 << 30  # of a GPU's memory in use: more than a driver and a desktop need


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
        f"{counted(workers[name], 'worker')} x {counted(threads or max(1, one.cores // workers[name]), 'thread')} "
        f"on {counted(one.cores, 'core')}"
        for name, one in survey.facts.items()
    }
    return checked("resources", "; ".join(sorted(told)), shares(survey.facts, workers, threads))


def gpus(survey: Survey) -> Check:
    """There are enough GPUs, free and whole."""
    return checked("gpus", _cards(survey), _gpu_findings(survey))


def _cards(survey: Survey) -> str:
    told: list[str] = []
    for name, one in survey.facts.items():
        links = sorted({link for gpu in one.gpus for link in gpu.links} - {"-"})
        joined = f" joined by {', '.join(links)}" if links else ""
        told.append(f"{name}: {len(one.gpus)} x {one.gpus[0].name}{joined}" if one.gpus else f"{name}: none")
    return "; ".join(told)


def _gpu_findings(survey: Survey) -> Iterator[Finding]:
    for name, workers in zip(survey.wanted.hosts, survey.wanted.workers, strict=True):
        cards = survey.facts[name].gpus if name in survey.facts else ()
        if cards and workers > len(cards):
            what = f"{workers} workers, but {len(cards)} GPUs"
            yield Finding("error", name, what, f"use --nproc {len(cards)}, or --device cpu when you train")
        for gpu in cards:
            who = f" by {listed(f'pid {pid}' for pid in gpu.processes)}" if gpu.processes else ""
            if gpu.processes or gpu.memory_used > max(BUSY_BYTES, gpu.memory // 20):
                what = f"GPU {gpu.index} is in use{who}: {gpu.memory_used >> 20} of {gpu.memory >> 20} MiB"
                yield Finding("warning", name, what, "wait for it, or choose others with CUDA_VISIBLE_DEVICES")
            if gpu.ecc_errors:
                what = f"GPU {gpu.index} has had {gpu.ecc_errors} memory errors that could not be corrected"
                yield Finding("error", name, what, "reset or replace it (nvidia-smi -q -d ECC,PAGE_RETIREMENT)")


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
