"""`paceline launch --check`: a script runs for some epochs that are cut short, then what it does wrong is told."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.config.settings import ClusterConfig
from paceline.contract.birth import BOOTSTRAP
from paceline.contract.facts import EPOCHS, MAX_STEPS, WHOLE, ScriptFacts, facts_file
from paceline.contract.job import JobSpec
from paceline.disk import reading, writing
from paceline.errors import ExitCode, UsageError
from paceline.observe.notices import notices
from paceline.observe.terminal import clean, say
from paceline.verify.script_page import judged, mistakes, script_page

CHECKED = "paceline.worker.checked"
FINDINGS = "check.json"
MAX_FACTS_BYTES = 64 << 20


def checked_job(job: JobSpec, cluster: ClusterConfig, words: Sequence[str]) -> JobSpec:
    """The job with workers that write down what their script does.

    Raises:
        UsageError: where this cannot be done.
    """
    asked = {
        f"--on {cluster.on}": cluster.on != "local",
        "--detach": cluster.detach,
        "--dry-run": cluster.dry_run,
        "--max-restarts": job.max_restarts > 0,
    }
    if said := [flag for flag, is_asked in asked.items() if is_asked]:
        raise UsageError(code="check-option", options=" and ".join(said))
    if BOOTSTRAP not in job.argv:
        raise UsageError(code="check-not-python", value=words[0])
    if job.nproc < 2:
        raise UsageError(code="check-of-one-rank")
    say(
        f"--check shortens the epochs of {job.name} ({EPOCHS} of {WHOLE}-{2 * WHOLE - 1} batches, then 1 batch each; "
        f"in a session {MAX_STEPS} steps) and changes nothing else. The script's usual output files will be overwritten"
    )
    # what drifts is on the page: a run that ended of it would hide what comes after
    return replace(job, on_drift="warn", argv=tuple(CHECKED if word == BOOTSTRAP else word for word in job.argv))


def told_findings(job: JobSpec, code: int) -> int:
    """Print the page, and leave the findings in the attempt's folder; the script's exit code, or 1 for findings."""
    ranks: list[ScriptFacts] = []
    attempt_dir = Path(job.attempt_dir)
    for rank in range(job.nproc):
        try:
            ranks.append(reading.decode(attempt_dir / facts_file(rank), ScriptFacts, limit_bytes=MAX_FACTS_BYTES))
        except OSError as error:
            say(f"nothing is known of rank {rank}: {error}")
    if len(ranks) < job.nproc or not any(facts.steps or facts.loaders for facts in ranks):
        say("--check has seen no training: no step of a torch optimizer, no DataLoader")
        return code or ExitCode.FAILED
    findings = judged(ranks, [*notices(attempt_dir)])
    with suppress(OSError):  # a full disk: the page is what counts
        writing.replace(attempt_dir / FINDINGS, msgspec.json.encode(findings))
    print(clean(script_page(job.name, ranks, findings, code)), flush=True)
    if code:
        say(f"the script has ended with exit code {code}: what comes after that is not checked")
    return code or (ExitCode.FAILED if mistakes(findings) else ExitCode.DONE)
