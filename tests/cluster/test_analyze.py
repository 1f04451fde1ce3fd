"""The log of a Slurm job whose tasks print into one file, each line with its task's number."""

from pathlib import Path

from tests.cluster.slurm import Slurm

from paceline.cli.logs import analyze_log_or_run

SCRIPT = """
import os, sys
rank = int(os.environ["SLURM_PROCID"])
for epoch in (1, 2):
    for batch in range(20):
        loss = "nan" if (rank, epoch, batch) == (1, 2, 7) else f"{2.3 / (20 * epoch + batch):.6f}"
        print(f"Train Epoch: {epoch} [{batch * 64}/2560] Loss: {loss}")
    print(f"Throughput: {1000 + rank} samples/s")
if rank == 1:
    raise RuntimeError("the end")
"""


def test_the_output_of_srun_with_labels(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    log = tmp_path / "job.out"
    submit = ("sbatch", "--parsable", "-N2", "--ntasks-per-node=1", f"--output={log}")
    job = slurm.run(*submit, f"--wrap=srun --label python3 {tmp_path}/script.py").stdout.strip()
    assert slurm.wait(job) == "FAILED"
    found = analyze_log_or_run(str(log))
    assert found.ranks == ["0", "1"] and found.formats == {"classic": 80, "key and value": 4}
    assert max(found.values["samples/s"]) == 1001
    assert len(found.values["loss"]) == 40
    assert found.not_finite == {"1": 1}
