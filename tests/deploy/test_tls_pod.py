"""A server with the files, the variables and the command of its pod, over mTLS with tokens."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import harness
import kubernetes_objects as k8s
import pytest
from harness import wait_until
from pod_machine import Machine, replaced
from tandem.cluster.local import find_binary

ROLE = "rollout"


@pytest.fixture
def pod(examples, certs, tmp_path):
    """Command, probe and variables of a server's pod, with its Secrets on this machine."""
    objects = examples["tls"]
    [one] = [pod for pod in k8s.servers(objects) if pod.name == f"tandem-{ROLE}-0"]
    tiny = harness.make_models(tmp_path / "tiny")
    shutil.copytree(tiny.senior, tmp_path / "models" / "Qwen2.5-0.5B-Instruct")
    machine = Machine(tmp_path / "pods", tmp_path / "models", certs)
    local = machine.mounts(one, objects)

    def here(words):
        program, *arguments = [replaced(word, local) for word in words]
        return [find_binary(program), *arguments]

    with socket.socket() as first, socket.socket() as second:
        for one_socket in (first, second):
            one_socket.bind(("127.0.0.1", 0))
        ports = [first.getsockname()[1], second.getsockname()[1]]
    environment = os.environ | {
        name: replaced(value, local) for name, value in one.environment().items()
    }
    environment |= {
        "TANDEM__SERVER__GRPC_PORT": str(ports[0]),
        "TANDEM__SERVER__METRICS_PORT": str(ports[1]),
        "TANDEM__MAX_MODEL_LEN": "128",
        "TANDEM__MAX_NUM_SEQS": "4",
    }
    probe = one.container["startupProbe"]["exec"]["command"]
    return here(one.container["command"]), here(probe), environment


def test_the_probe_of_a_pod_with_tls_tells_when_its_server_serves(pod, tmp_path):
    command, probe, environment = pod

    def healthy():
        done = subprocess.run(probe, env=environment, capture_output=True, timeout=60)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 0

    assert not healthy()
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(healthy, seconds=60)
    finally:
        server.terminate()
        assert server.wait(60) == 0
    assert not healthy()
