"""How a run ended that its ranks did not live to say."""

from paceline.cli.train import make_failed_run_summary
from paceline.config.settings import DataConfig, TrainConfig
from paceline.runs.events import Step
from paceline.runs.summary import Summary, write_summary
from paceline.runs.writers import EventWriter

CONFIG = TrainConfig(task="t", data=DataConfig(batch_size=8))


def test_a_killed_run_has_what_was_known_by_then(tmp_path):
    with EventWriter(tmp_path / "events-0.jsonl") as writer:
        for step in (1, 2):
            writer.write(Step(step, 0, 1.0, 16, 1e-3, 0.1, 0.0, 0.0))
    summary = make_failed_run_summary(tmp_path, CONFIG, 2, 137)
    assert (summary.exit, summary.strategy, summary.global_batch) == (137, "bucketed", 16)
    assert (summary.steps, summary.samples_seen) == (2, 32)


def test_the_exit_code_counts_more_than_what_the_ranks_believed(tmp_path):
    write_summary(tmp_path, Summary(task="t", exit=0, steps=9))
    assert make_failed_run_summary(tmp_path, CONFIG, 2, 134) == Summary(task="t", exit=134, steps=9)
