"""The chart's pods under `podman kube play`: import of the model, servers, two steps of a run.

podman knows pods, ConfigMaps and claims, but no controllers, Services and gRPC probes. The test
does what those do: makes the pods, gives their names addresses, and asks for health.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import engine
import kubernetes_objects as k8s
import manifests
import pytest
import yaml
from kubernetes_examples import example_values
from tandem.rpc.transport import Connection

pytestmark = pytest.mark.skipif(not shutil.which("podman"), reason="podman is not installed")

NETWORK = "tandem-kube"
SUBNET = "10.243.7."


def values() -> dict[str, Any]:
    """The example for a trial, with the images under test and a run of two short steps."""
    prefix, _, tag = engine.image("rollout").partition("tandem-rollout:")
    changed = example_values("cpu-small")
    changed["image"] = {"registry": prefix.rstrip("/"), "tag": tag}
    run = changed["run"]["config"]
    run |= {"steps": 2, "batch": {"prompts_per_step": 2, "samples_per_prompt": 2}}
    run["data"]["reasoning_gym"]["size"] = 20
    changed["rollout"]["config"]["max_num_seqs"] = 4
    return changed


def played(pod: k8s.Pod, aliases: dict[str, str]) -> dict[str, Any]:
    """A Pod for podman: with its variables expanded, the names of the others, and no probes."""
    spec = json.loads(json.dumps(pod.spec))
    for container in spec["containers"]:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(probe, None)
    environment = [{"name": name, "value": text} for name, text in pod.environment().items()]
    spec["containers"][0]["env"] = environment
    spec["hostAliases"] = [{"ip": ip, "hostnames": [name]} for name, ip in aliases.items()]
    # podman 4.3 fails to remove init containers of the type "once".
    kind = {"io.podman.annotations.init.container.type": "always"}
    metadata = {"name": pod.name, "labels": dict(pod.labels), "annotations": kind}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class Cluster:
    """Pods of a release, each with an address of its own."""

    def __init__(self, objects: list[Any], folder: Path) -> None:
        self._folder = folder
        self.pods = {pod.component: pod for pod in k8s.pods(objects)}
        self.addresses = {
            role: f"{SUBNET}{number}" for number, role in enumerate(self.pods, start=10)
        }
        self._aliases = {
            f"{pod.name}.tandem-{role}.tandem.svc": self.addresses[role]
            for role, pod in self.pods.items()
            if role in k8s.SERVICES
        }
        self._claims = [one for one in objects if one["kind"] == "PersistentVolumeClaim"]
        self._files = [one for one in objects if one["kind"] == "ConfigMap"]

    def start(self, role: str) -> None:
        """Starts the pod of a role, with the files that it names."""
        file = self._folder / f"{role}.yaml"
        file.write_text(yaml.safe_dump_all([*self._files, played(self.pods[role], self._aliases)]))
        address = self.addresses[role]
        engine.podman("kube", "play", "--network", NETWORK, "--ip", address, str(file))

    def make_volumes(self) -> None:
        """Makes the volumes that the pods share."""
        file = self._folder / "claims.yaml"
        file.write_text(yaml.safe_dump_all(self._claims))
        engine.podman("kube", "play", str(file))

    def container(self, role: str) -> engine.Container:
        """The container of a role that does the work."""
        pod = self.pods[role]
        return engine.Container(f"{pod.name}-{pod.container['name']}")

    def serves(self, role: str) -> bool:
        """Whether the service that the startup probe names answers SERVING."""
        probe = self.pods[role].container["startupProbe"]["grpc"]
        with Connection(f"{self.addresses[role]}:{probe['port']}") as connection:
            return connection.check_health(probe["service"]).status == "SERVING"

    def remove(self) -> None:
        """Removes the pods and the volumes."""
        for pod in self.pods.values():
            engine.podman("pod", "rm", "--force", "--time", "5", pod.name, check=False)
        claims = [claim["metadata"]["name"] for claim in self._claims]
        engine.podman("volume", "rm", "--force", *claims, check=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The pods of a release; nothing is started."""
    objects = manifests.manifests(manifests.render(values()))
    engine.podman("network", "create", "--subnet", f"{SUBNET}0/24", NETWORK)
    one = Cluster(objects, tmp_path_factory.mktemp("kube"))
    try:
        yield one
    finally:
        one.remove()
        engine.podman("network", "rm", "--force", NETWORK, check=False)


def test_the_pods_of_the_chart_import_a_model_and_train(cluster):
    cluster.make_volumes()
    # podman waits for the containers that wait for the model, so it is there before.
    cluster.start("models")
    assert cluster.container("models").wait(300) == 0, cluster.container("models").logs()
    for role in ("rollout", "trainer"):
        cluster.start(role)
    for role in ("rollout", "trainer"):
        engine.wait_for(
            lambda role=role: cluster.serves(role),
            300,
            lambda role=role: cluster.container(role).logs(),
        )
    cluster.start("client")
    run = cluster.container("client")
    assert run.wait(600) == 0, run.logs()
    metrics = cluster.container("trainer").execute("cat", "/runs/sums/metrics.jsonl").stdout
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == [1, 2]


def test_the_pods_of_the_chart_drain(cluster):
    for role in ("trainer", "rollout"):
        container = cluster.container(role)
        engine.podman("stop", "--time", "60", container.name)
        assert container.state()["ExitCode"] == 0
        assert '"stopped"' in container.logs()
