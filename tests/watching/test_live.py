"""A Prometheus scrapes real servers during real runs: every panel has data, every alert fires.

A run's steps wait for scrapes: tiny models would be trained before the second one.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import shipped
from drafts import write_speculator
from monitor import INTERVAL, Monitor, has_data, wait_until
from tandem.cluster.local import LocalCluster
from tandem.errors import DataLossError, DeadlineError, UnavailableError
from tandem.rpc.requests import PolicySample

# Mostly waiting; test_shipped.py reads the same panels and alerts.
pytestmark = pytest.mark.slow

# Panels that have data only after a fault, and those of runs with a critic.
AFTER_A_FAULT = {"Calls that failed"}
WITH_A_CRITIC = {query.panel for query in shipped.queries() if "tandem_critic_" in query.text}
# Alerts without a fault here, and why.
NOT_PROVOKED = {
    "TandemMemoryShort": "test_compose.py provokes it, in a container with a memory limit",
    "TandemDenials": "test_secured.py provokes it",
    "TandemCertificateExpires": "test_secured.py provokes it",
}
# Panels of what these servers lack: TLS, whose panel test_secured.py looks at, images and experts.
NOT_HERE = {
    "Pixels of images and videos",
    "Time until certificates expire",
    "Routers (mixtures of experts)",
    "Load of experts (mixtures of experts)",
}
TANDEM = harness.TANDEM["word"]
# The same trajectories are trained on, two steps a second, until the alerts have fired.
MAX_STALENESS = 1000


@dataclasses.dataclass
class Watched:
    """A cluster and its monitor, and what its panels showed.

    Attributes:
        shown: results of all queries at several moments, by moment.
    """

    running: LocalCluster
    monitor: Monitor
    directory: Path
    shown: dict[str, dict[shipped.Query, list[dict[str, Any]]]] = dataclasses.field(
        default_factory=dict
    )

    def look(self, moment: str) -> None:
        """Evaluates the query of every panel."""
        self.shown[moment] = {
            query: self.monitor.query(query.with_variables()) for query in shipped.queries()
        }


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Servers of every role, one of them of two ranks, after a GRPO run and a PPO run."""
    directory = tmp_path_factory.mktemp("watched")
    models = harness.make_models(directory / "models")
    heads = str(write_speculator(directory / "heads", models.senior))
    with (
        harness.cluster(
            directory / "cluster",
            models,
            rollout={
                "max_queue": 16,
                "server": {"drain_seconds": 240},
                "senior_speculator": heads,
            },
            trainer={
                "ranks": 2,
                # The alert of a missing rank fires before the other one gives up.
                "strategy": {"name": "zero", "stage": 1, "heartbeat_timeout_seconds": 600},
                "reference_model": str(models.senior),
                "junior_model": str(models.junior),
                "speculator": {
                    "adapter": "mlp",
                    "path": heads,
                    "optimizer": {"learning_rate": 1e-3},
                },
            },
            critic={},
        ) as running,
        Monitor(directory, running.servers) as monitor,
        harness.rollout_client(running) as client,
    ):
        # The run's authors may change with every token: nothing is drafted for it.
        alone = harness.prompts(2, {"enabled": False}, speculative={"method": "heads"})
        found = Watched(running, monitor, directory)
        ups = len(running.servers)
        wait_until(lambda: len(monitor.query("up == 1")) == ups)
        for name, estimator in {"GRPO": "group_relative", "PPO": "gae"}.items():
            steps = 3

            def on_step(line: dict[str, Any], name: str = name, steps: int = steps) -> None:
                client.generate(alone)
                time.sleep(INTERVAL + 1)
                if line["step"] == steps:
                    found.look(f"during {name}")

            harness.run_on(
                running,
                models,
                directory / name,
                on_step=on_step,
                steps=steps,
                objective={
                    "advantage_estimator": estimator,
                    "kl_coefficient": 0.01,
                    "junior_kl_coefficient": 0.01,
                },
                checkpoint={"every": 2},
            )
            found.look(f"after {name}")
        yield found


@pytest.mark.parametrize("dashboard", [file.stem for file in shipped.DASHBOARDS])
def test_panels_have_data_during_runs_and_right_after(watched, dashboard, subtests):
    for query in shipped.queries():
        if query.dashboard == dashboard:
            with subtests.test(str(query)):
                require_data(watched, query)


def require_data(watched: Watched, query: shipped.Query) -> None:
    """Fails unless a panel had data when it should, and none when it should not."""
    if query.panel in AFTER_A_FAULT:
        assert not any(shown[query] for shown in watched.shown.values())
        return
    for moment, shown in watched.shown.items():
        if query.panel in NOT_HERE:
            assert not shown[query], moment
        elif query.panel not in WITH_A_CRITIC or "PPO" in moment:
            assert has_data(shown[query]), moment


@pytest.mark.parametrize("file", shipped.DASHBOARDS, ids=lambda file: file.stem)
def test_variables_have_values(watched, file):
    for variable in json.loads(file.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            inside = variable["query"].removeprefix("label_values(").removesuffix(")")
            series, label = inside.rsplit(", ", 1)
            found = watched.monitor.query(shipped.substitute(series, {}))
            values = {one["metric"][label] for one in found}
            assert len(values) == {"cluster": 1, "server": 3, "rank": 2, "instance": 4}[label]


def test_a_selected_server_is_shown_alone(watched):
    for query in shipped.queries():
        if query.dashboard == "tandem-server":
            found = watched.monitor.query(query.with_variables(server="trainer", rank="1"))
            assert {one["metric"].get("server", "trainer") for one in found} <= {"trainer"}
            assert {one["metric"].get("rank", "1") for one in found} <= {"1"}


def test_logs_have_the_fields_that_links_search(watched):
    lines = [
        json.loads(line)
        for server in watched.running.servers
        for line in server.log.read_text().splitlines()
        if line.startswith("{")
    ]
    [step] = [one for one in lines if one["event"] == "train_step" and one["step"] == 2][:1]
    assert step["request_id"]
    about = [one for one in lines if one.get("version") == step["version"]]
    assert {"train_step", "weights_committed"} <= {one["event"] for one in about}
    assert {one["event"] for one in lines if one.get("request_id") == step["request_id"]}


def test_no_alert_fires_without_a_fault(watched):
    assert watched.monitor.fired() == set()


# Everything above sees a healthy cluster: pytest runs a file in its order.


@pytest.fixture(scope="module")
def provoked(watched: Watched) -> Watched:
    """The cluster after many faults; each alert has had the time to fire."""
    monitor, running = watched.monitor, watched.running
    [rollout_server] = running.rollouts
    last_rank = next(server for server in running.servers if server.rank == 1)

    with (
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        number = itertools.count(1)

        def step(samples: list[PolicySample], **objective: Any) -> Any:
            return trainer.train_step(
                samples,
                run_id="faults",
                step=next(number),
                expected_version=trainer.info().server.weights.version,
                objective={"max_staleness": MAX_STALENESS, **objective},
            ).report

        groups = rollout.generate(
            harness.prompts(2, TANDEM, num_samples=4, return_other_logprobs=True)
        )
        samples = [
            PolicySample(trajectory, f"group-{number}", reward=float(index))
            for number, group in enumerate(groups)
            for index, trajectory in enumerate(group)
        ]
        saved = trainer.save_checkpoint(str(watched.directory / "damaged"), "one")

        # Log-probabilities of another model, in steps that are neither published nor saved.
        shifted = [_shifted(sample) for sample in samples]
        assert step(shifted).metrics["mismatch/k3"] > 0.01
        assert step(
            [_overflowing(sample) for sample in samples], advantage_estimator="provided"
        ).skipped
        # Port 1 has no server.
        assert trainer.publish_weights(["127.0.0.1:1"]).results[0].status.code
        # A rank has a file each.
        weights = min(Path(saved).glob("model-*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
        with pytest.raises(DataLossError):
            trainer.load_checkpoint(saved)

        # Clients wait for a server that is paused, and give up.
        rollout.pause()
        for _ in range(5):
            with pytest.raises(DeadlineError):
                rollout.generate(harness.prompts(1, TANDEM), timeout_seconds=2)
        waiting = threading.Thread(target=_fill_queue, args=[running])
        waiting.start()
        monitor.wait_for_alerts(
            {
                ("TandemMismatch", "trainer"),
                ("TandemUpdatesNotFinite", "trainer"),
                ("TandemPublicationFails", "trainer"),
                ("TandemCallsFail", "trainer"),
                ("TandemRolloutStale", "rollout"),
                ("TandemCheckpointOld", "trainer"),
                ("TandemCallsGivenUp", "rollout"),
                ("TandemQueueFull", "rollout"),
                ("TandemNoProgress", "rollout"),
            },
            meanwhile=lambda: step(shifted),
        )

    # A rank hangs, a server drains work that cannot end, another one goes for good.
    last_rank.process.send_signal(signal.SIGSTOP)
    rollout_server.process.terminate()
    running.critic.process.kill()
    running.critic.process.wait()
    monitor.watch([server for server in running.servers if server.role != "critic"])
    monitor.wait_for_alerts(
        {
            ("TandemRanksMissing", "trainer"),
            ("TandemServerDown", "trainer"),
            ("TandemServerNotReady", "rollout"),
            ("TandemServerGone", "critic"),
        }
    )
    watched.look("after faults")
    last_rank.process.send_signal(signal.SIGCONT)
    rollout_server.process.kill()
    waiting.join(60)
    return watched


def _shifted(sample: PolicySample) -> PolicySample:
    trajectory = copy.deepcopy(sample.trajectory)
    logprobs = np.frombuffer(trajectory.author_logprobs.data, np.float32) - np.float32(0.5)
    trajectory.author_logprobs.data = logprobs.tobytes()
    return dataclasses.replace(sample, trajectory=trajectory)


def _overflowing(sample: PolicySample) -> PolicySample:
    advantages = np.full(len(sample.trajectory.response_token_ids), 1e38, np.float32)
    return dataclasses.replace(sample, advantages=advantages)


def _fill_queue(running: LocalCluster) -> None:
    # The server ends while the sequences wait: it drains as long as they do, and shows the alert.
    with harness.rollout_client(running) as client, suppress(UnavailableError):
        client.generate(harness.prompts(4, TANDEM, num_samples=4), timeout_seconds=480)


ALERTS = [rule["alert"] for rule in shipped.rules("alerts")]


def test_a_fault_makes_the_alert_fire(provoked):
    fired = {name for name, _ in provoked.monitor.fired()}
    assert {*ALERTS} - {*NOT_PROVOKED} - fired == set()


def test_alerts_that_are_not_provoked_exist():
    assert NOT_PROVOKED.keys() <= set(ALERTS)


def test_panels_of_faults_have_data_after_faults(provoked):
    queries = [query for query in shipped.queries() if query.panel in AFTER_A_FAULT]
    assert queries
    for query in queries:
        assert has_data(provoked.shown["after faults"][query]), query


@pytest.mark.parametrize("file", shipped.DASHBOARDS, ids=lambda file: file.stem)
def test_dashboards_mark_alerts(provoked, file):
    [marks] = json.loads(file.read_text())["annotations"]["list"]
    assert provoked.monitor.query(shipped.substitute(marks["expr"], {}))


def test_prometheus_sends_the_alerts_to_alertmanager(provoked):
    sent = {
        (one["labels"]["alertname"], one["labels"]["server"]) for one in provoked.monitor.received
    }
    assert provoked.monitor.fired() <= sent
    assert all(one["annotations"]["runbook"] for one in provoked.monitor.received)
