"""Runs that start their servers themselves, and lose one."""

from __future__ import annotations

import os
import signal

import harness
from harness import metrics_without_clock
from tandem.run_directory.directory import RunDirectory
from tandem.session.opening import open_session
from tandem.training.loop import train


def run(models, folder, on_step=lambda session, line: None):
    """Trains on a cluster of the run's own; returns the metrics."""
    sections = harness.sections(models, rollout={}, trainer={})
    cluster = {"directory": str(folder / "cluster"), **sections}
    config = harness.run_settings(folder, models, None, steps=4, cluster=cluster)
    with (
        RunDirectory.open(config, "train") as directory,
        open_session(config) as session,
    ):
        train(session, directory, lambda line: on_step(session, line))
    return metrics_without_clock(folder / "run")


def test_a_run_goes_on_with_a_rollout_server_that_it_started_again(models, tmp_path):
    undisturbed = run(models, tmp_path / "first")

    def kill(session, line):
        if line["step"] == 2:
            [server] = session.cluster.rollouts
            os.kill(server.process.pid, signal.SIGKILL)

    disturbed = run(models, tmp_path / "second", kill)
    assert disturbed == undisturbed
    log = (tmp_path / "second" / "run" / "logs" / "attempt_1.log").read_text()
    assert "WARNING rollout-0 ended with signal SIGKILL" in log
    assert "INFO rollout-0 is serving again" in log
