"""The compose profile of a node of eight GPUs: its services, its settings, and their plan."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import memory
import pytest
import yaml
from kubernetes_examples import REPOSITORY, example_values

COMPOSE = REPOSITORY / "deploy" / "compose"
ROLLOUTS = [f"rollout-node-{gpu}" for gpu in range(4)]
TRAINER = "trainer-node"


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services of the profile, with the defaults of their variables."""
    text = (COMPOSE / "compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    every = yaml.safe_load(text)["services"]
    return {name: one for name, one in every.items() if one.get("profiles") == ["gpu-node"]}


def settings(role: str) -> dict[str, Any]:
    """The configuration file of a server of the node."""
    return yaml.safe_load((COMPOSE / "config" / "gpu-node" / f"{role}.yaml").read_text())


def devices(service: dict[str, Any]) -> list[str]:
    """The GPUs that a service reserves."""
    [reserved] = service["deploy"]["resources"]["reservations"]["devices"]
    assert reserved["driver"] == "nvidia"
    assert reserved["capabilities"] == ["gpu"]
    return reserved["device_ids"]


def mounted(service: dict[str, Any], target: str) -> Path:
    """The file of the repository that a service sees as `target`."""
    [source] = [one.split(":")[0] for one in service["volumes"] if f":{target}:" in one]
    return (COMPOSE / source).resolve()


def test_every_gpu_belongs_to_one_service(services):
    assert services.keys() == {*ROLLOUTS, TRAINER}
    assert [devices(services[name]) for name in ROLLOUTS] == [["0"], ["1"], ["2"], ["3"]]
    assert devices(services[TRAINER]) == ["4", "5", "6", "7"]
    for name, service in services.items():
        assert service["image"] == f"tandem-{name.split('-')[0]}-cuda:0.1.0"


def test_every_server_reads_its_settings_and_publishes_where_clients_find_it(services):
    for name in ROLLOUTS:
        environment = services[name]["environment"]
        file = mounted(services[name], environment["TANDEM_CONFIG"])
        assert file == COMPOSE / "config" / "gpu-node" / "rollout.yaml"
        assert environment["TANDEM__SERVER__ADVERTISED_ADDRESS"] == f"{name}:7701"
        # Settings of the environment win over the file, which has the models.
        assert not [key for key in environment if "MODEL" in key or "COMPUTE" in key]
        assert services[name]["ports"] == []
    environment = services[TRAINER]["environment"]
    file = mounted(services[TRAINER], environment["TANDEM_CONFIG"])
    assert file == COMPOSE / "config" / "gpu-node" / "trainer.yaml"
    assert not [key for key in environment if "MODEL" in key or "COMPUTE" in key]


def test_certificates_name_every_rollout_server():
    tls = yaml.safe_load((COMPOSE / "compose.tls.yaml").read_text())["services"]
    assert {*ROLLOUTS, TRAINER} <= tls.keys()
    [script] = tls["certs"]["command"]
    assert {f"--host {name}" for name in ROLLOUTS} <= set(re.findall(r"--host \S+", script))


def test_the_node_is_that_of_the_chart(services):
    values = example_values("gpu-node")
    for role in ("rollout", "trainer"):
        assert settings(role) == values[role]["config"]
    assert len(ROLLOUTS) == values["rollout"]["replicas"]
    of_chart = {one["name"]: one["value"] for one in values["trainer"]["env"]}
    environment = services[TRAINER]["environment"]
    assert of_chart.keys() <= environment.keys()
    for variable in ("NCCL_DEBUG", "NCCL_IB_DISABLE"):
        assert environment[variable] == of_chart[variable]


def test_the_memory_is_the_plan_of_the_servers(services, models):
    ranks = example_values("gpu-node")["trainer"]["ranks"]
    planned = memory.plan("rollout", settings("rollout"), 1, models)
    for name in ROLLOUTS:
        assert services[name]["mem_limit"] == f"{memory.request(planned)}g"
    planned = ranks * memory.plan("trainer", settings("trainer"), ranks, models)
    assert services[TRAINER]["mem_limit"] == f"{memory.request(planned)}g"
    # The part of /dev/shm that NCCL takes counts to that memory.
    shm = int(services[TRAINER]["shm_size"].removesuffix("g"))
    assert shm == int(example_values("gpu-node")["ranks"]["shmSize"].removesuffix("Gi"))


def test_the_servers_fit_into_gpus_of_80_gb(models):
    for role, ranks in (("rollout", 1), ("trainer", 4)):
        size = memory.gpu_plan(role, settings(role), ranks, models, "80GB")
        assert size is not None and 1 < size < 72, role  # a tenth is left to CUDA
    with pytest.raises(RuntimeError, match="GPU"):
        memory.gpu_plan("rollout", settings("rollout"), 1, models, "2GB")


def test_the_trainer_starts_four_ranks(services, tmp_path):
    """Runs the entrypoint with a program that tells its environment in the server's place."""
    service = services[TRAINER]
    shell, script, *arguments = service["entrypoint"]
    program = tmp_path / arguments[-1]
    variables = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"
    # A rank that ends takes the others with it, which end as a server does.
    wait = f'until [ "$(ls "{tmp_path}" | grep -c told)" = 4 ]; do sleep 0.1; done'
    tell = f'echo "{variables}" >"{tmp_path}/$RANK.told"'
    program.write_text(f"#!/bin/sh\ntrap 'exit 0' TERM\n{tell}\n{wait}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {
        key: value for key, value in service["environment"].items() if "TANDEM" not in key
    }
    done = subprocess.run(
        [shell, mounted(service, script), *arguments],
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    told = {path.name: path.read_text().strip() for path in tmp_path.glob("*.told")}
    assert told == {f"{rank}.told": f"{rank} {rank} 4 4 localhost:29500" for rank in range(4)}
    assert len(devices(service)) == len(told)
