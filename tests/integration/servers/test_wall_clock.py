"""Someone sets the machine's clock while servers work: no call ends, and none waits longer."""

from __future__ import annotations

import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
import pytest
from harness import prompts, wait_until
from tandem.cluster.local import Server
from tandem.rpc.requests import PolicySample

HOUR = 3600
SAMPLING = {"max_tokens": 100, "ignore_eos": True}


class WallClock:
    """The clock of the processes that start from now on: the machine's, with `seconds` added."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source, library = Path(__file__).with_name("wall_clock.c"), folder / "wall_clock.so"
        compile_it = ["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"]
        subprocess.run(compile_it, check=True)
        self._file = folder / "wall_clock"
        self.add(0)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv("WALL_CLOCK", str(self._file))

    def add(self, seconds: int) -> None:
        """Sets the clock."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:  # mapped by the servers: it must stay the same file
            file.write(struct.pack("<q", seconds))


def wait_for_clock(server: Server, seconds: int) -> None:
    """Returns when the server's last progress shows that its clock is `seconds` before ours."""
    progress = "tandem_last_progress_timestamp_seconds"
    wait_until(lambda: abs(harness.gauge(server, progress) - seconds - time.time()) < 60)


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """The wall clock of a test's servers."""
    return WallClock(tmp_path, monkeypatch)


def test_calls_do_not_notice_that_the_wall_clock_is_set(clock, models, tmp_path):
    many = prompts(3, {"prob_senior": 0.5}, sampling=SAMPLING, num_samples=100)
    with (
        harness.cluster(tmp_path / "cluster", models, trainer={}, critic={}) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
        harness.critic_client(running) as critic,
        ThreadPoolExecutor(1) as pool,
    ):
        server = running.rollouts[0]
        expected = rollout.generate(many)
        # The last two set the clock back, by a minute and by two hours.
        for step, seconds in enumerate((0, HOUR, HOUR - 60, -HOUR)):
            work = pool.submit(rollout.generate, many)
            wait_until(lambda: harness.gauge(server, "tandem_sequences_running") > 0)
            clock.add(seconds)
            assert not work.done()
            groups = work.result(timeout=60)
            assert [list(map(harness.tokens, one)) for one in groups] == [
                list(map(harness.tokens, one)) for one in expected
            ]
            wait_for_clock(server, seconds)
            samples = [
                PolicySample(one, f"g{g}", reward=float(i % 2))
                for g, group in enumerate(groups)
                for i, one in enumerate(group[:2])
            ]
            report = trainer.train_step(
                samples,
                run_id="r",
                step=step + 1,
                expected_version=step,
                objective={"advantage_estimator": "gae", "max_staleness": 10},
                timeout_seconds=60,
            ).report
            assert not report.skipped, report.skip_reason
            for client in (rollout, trainer, critic):
                assert client.health() == "SERVING"
                assert 0 <= client.info().server.uptime_seconds < 600
        [result] = trainer.publish_weights([server.address]).results
        assert result.status.code == 0, result.status
        trainer.save_checkpoint(str(tmp_path / "checkpoints"), "step_4")
