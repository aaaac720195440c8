"""The kustomize base and its overlays: what they build passes the checks of the chart's objects."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import kubernetes_objects as k8s
import manifest_checks as checks
import pytest
import yaml
from kubernetes_examples import KUBERNETES
from pod_machine import Machine

OVERLAYS = sorted(path.name for path in (KUBERNETES / "kustomize" / "overlays").iterdir())
GIVEN = ("tandem-tls", "tandem-tokens")


def _has_kustomize():
    """Whether kubectl is there with kustomize 5: older ones lack fields of the overlays."""
    if not shutil.which("kubectl"):
        return False
    said = subprocess.run(
        ["kubectl", "version", "--client", "--output", "json"], capture_output=True, text=True
    ).stdout
    return re.match(r"v[5-9]", json.loads(said or "{}").get("kustomizeVersion", "")) is not None


pytestmark = pytest.mark.skipif(not _has_kustomize(), reason="no kubectl with kustomize 5")


@pytest.fixture(scope="module")
def built():
    """The objects of base and overlays by name."""

    def build(path):
        folder = KUBERNETES / "kustomize" / path
        command = ["kubectl", "kustomize", folder]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return list(yaml.safe_load_all(text))

    return {"base": build("base")} | {name: build(f"overlays/{name}") for name in OVERLAYS}


def servers_of(objects):
    """The container of every StatefulSet by name."""
    sets = k8s.of_kind(objects, "StatefulSet")
    return {name: one["spec"]["template"]["spec"]["containers"][0] for name, one in sets.items()}


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_what_kustomize_builds_passes_every_check(built, name, models, certs, tmp_path):
    objects = built[name]
    assert checks.schema_problems(objects) == []
    assert checks.security_problems(objects) == []
    assert checks.volume_problems(objects, GIVEN) == []
    assert checks.selector_problems(objects) == []
    assert checks.address_problems(objects) == []
    assert checks.probe_problems(objects) == []
    assert Machine(tmp_path, models, certs).problems(objects) == []


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_the_namespace_enforces_the_restricted_standard(built, name):
    [namespace] = k8s.of_kind(built[name], "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    named = {one["metadata"].get("namespace") for one in built[name] if one is not namespace}
    assert named == {namespace["metadata"]["name"]}


def test_the_overlays_say_what_they_change(built):
    for claim in k8s.of_kind(built["dev"], "PersistentVolumeClaim").values():
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert k8s.of_kind(built["cpu"], "StatefulSet")["tandem-rollout"]["spec"]["replicas"] == 2
    assert {one["resources"]["limits"]["cpu"] for one in servers_of(built["cpu"]).values()} == {"8"}
    for container in servers_of(built["gpu"]).values():
        assert container["image"].split(":")[0].endswith("-cuda")
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert {"name": "TANDEM__COMPUTE__DEVICE", "value": "cuda"} in container["env"]
