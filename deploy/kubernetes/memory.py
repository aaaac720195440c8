"""Prints the memory that the pods of a release need, and the sizes of its volumes.

    memory.py VALUES.yaml --models DIRECTORY [--gpu-memory 80GB]

DIRECTORY is what the pods see as /models. Every server's binary plans the memory of one rank with
its `--check-config`, from the configuration that the chart gives it; nothing is started, and no GPU
is needed. A request is the plan and a quarter, in whole GiB: the plan leaves out buffers of calls
and weight transfers, and what the allocator keeps. For a server on GPUs it is the request of the
same server without one, which is more than it needs; the plan of its GPUs has a line of its own.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import manifests
import yaml
from safetensors import safe_open
from tandem.cluster.local import find_binary
from tandem.preflight.memory import PlannedMemory
from tandem.settings.run import CheckpointSettings

GIB = 2**30
# Bytes of a parameter in a checkpoint (weight and two moments), and in a publication.
CHECKPOINT_BYTES, WEIGHT_BYTES = 12, 4
# Checkpoints that a run keeps.
KEEP = CheckpointSettings.model_fields["keep"].default
# Share of the plan that a request adds to it.
HEADROOM = 0.25


def on_gpus(config: dict[str, Any]) -> bool:
    """Returns whether a server computes on GPUs."""
    return config.get("compute", {}).get("device") == "cuda"


def without_gpus(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the same server on the CPU."""
    of_gpus = ("gpu_memory_utilization", "gpu_devices")
    changed = {key: value for key, value in config.items() if not key.endswith(of_gpus)}
    for lane in ("senior", "junior"):
        if lane in config:
            changed[lane] = {k: v for k, v in config[lane].items() if k not in of_gpus}
    on_cpu = {"device": "cpu", "kernels": "aten", "product_rows": 0}
    return changed | {"compute": config["compute"] | on_cpu}


def check_config(
    role: str, config: dict[str, Any], ranks: int, models: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs a server's `--check-config` for a rank."""
    # Secrets and addresses of the pod are not here, and need no memory.
    config = {key: value for key, value in config.items() if key != "server"}
    text = yaml.safe_dump(config).replace("/models/", f"{models.resolve()}/")
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        command = [find_binary(f"tandem-{role}-server"), "--config", file.name, "--check-config"]
        return subprocess.run([*command, *options], env=environment, capture_output=True, text=True)


def plan(role: str, config: dict[str, Any], ranks: int, models: Path) -> int:
    """Returns the bytes of the host's memory that a rank of a server needs.

    Raises RuntimeError with the binary's message for a bad configuration.
    """
    if on_gpus(config):
        config = without_gpus(config)
    if role == "rollout":  # all that its cache can use, whatever memory this machine has
        config = {"kv_cache_bytes": 10**15} | config
    done = check_config(role, config, ranks, models)
    # The plan is also printed where it is more than this machine has.
    items = PlannedMemory.parse(role, done.stdout).items
    if not items:
        raise RuntimeError(done.stderr.strip())
    return round(sum(items.values()))


def gpu_plan(
    role: str, config: dict[str, Any], ranks: int, models: Path, size: str
) -> float | None:
    """Returns the GB that a rank of a server needs of its GPU of this size; None without GPUs.

    Raises RuntimeError with the binary's message where it does not fit.
    """
    if not on_gpus(config):
        return None
    done = check_config(role, config, ranks, models, "--assume-gpu-memory", size)
    found = re.search(r"GPU of a rank: ([\d.]+) GB needed", done.stdout)
    # The host's memory is planned elsewhere, and that of this machine is not the pod's.
    if found is None or (done.returncode != 0 and "GPU" in done.stderr):
        raise RuntimeError(done.stderr.strip())
    return float(found[1])


def request(planned: int) -> int:
    """Returns the GiB to request for a plan in bytes."""
    return math.ceil(planned * (1 + HEADROOM) / GIB)


def configurations(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the configuration of every server of a release, by role."""
    objects = manifests.manifests(manifests.render(values))
    return {
        one["metadata"]["name"].removeprefix(f"{manifests.RELEASE}-"): yaml.safe_load(
            one["data"]["config.yaml"]
        )
        for one in objects
        if one["kind"] == "ConfigMap" and "config.yaml" in one["data"]
    }


def plans(values: dict[str, Any], models: Path) -> dict[str, int]:
    """Returns the planned bytes of a pod of every server of a release, by role."""
    return {
        role: plan(role, config, values[role].get("ranks", 1), models)
        * values[role].get("ranksPerPod", 1)
        for role, config in configurations(values).items()
    }


def gpu_plans(values: dict[str, Any], models: Path, size: str) -> dict[str, float]:
    """Returns the planned GB of each GPU of this size, of the servers that have some, by role."""
    planned = {
        role: gpu_plan(role, config, values[role].get("ranks", 1), models, size)
        for role, config in configurations(values).items()
    }
    return {role: gb for role, gb in planned.items() if gb is not None}


def parameters(directory: Path) -> int:
    """Returns the number of parameters in the safetensors files of a model."""
    count = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def volumes(values: dict[str, Any], models: Path) -> dict[str, int]:
    """Returns the bytes that the volumes of a release must hold, by the value that sizes them."""

    def size(role: str) -> int:
        named = values.get(role, {}).get("config", {}).get("model")
        return parameters(models / Path(named).relative_to("/models")) if named else 0

    keep = values.get("run", {}).get("config", {}).get("checkpoint", {}).get("keep", KEEP)
    # A new checkpoint is written before the oldest is removed, and state.json keeps one more.
    checkpoints = (keep + 2) * CHECKPOINT_BYTES
    return {
        "runs.size": checkpoints * (size("trainer") + size("critic")),
        "trainer.scratchSize": WEIGHT_BYTES * size("trainer"),
    }


def main() -> int:
    """Prints a line of each role; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("values", type=Path, help="values of the chart")
    parser.add_argument("--models", type=Path, required=True, help="folder of /models")
    parser.add_argument("--gpu-memory", default="80GB", help="size of each GPU, by default 80GB")
    arguments = parser.parse_args()
    try:
        values = yaml.safe_load(arguments.values.read_text())
        planned = plans(values, arguments.models)
        of_gpus = gpu_plans(values, arguments.models, arguments.gpu_memory)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    for role, size in planned.items():
        print(f"{role}: {size / GIB:.2f} GiB planned, request memory: {request(size)}Gi")
    for role, gigabytes in of_gpus.items():
        print(f"{role}: {gigabytes:.1f} GB planned of each GPU of {arguments.gpu_memory}")
    for value, size in volumes(values, arguments.models).items():
        print(f"{value}: at least {math.ceil(size / GIB)}Gi")
    return 0


if __name__ == "__main__":
    sys.exit(main())
