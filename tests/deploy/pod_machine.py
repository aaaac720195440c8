"""The pods of a release, judged by the servers' programs and the client's schema of a run."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes_objects import PROBES, SERVICES, Object, Pod, of_kind, pods, servers
from tandem.cluster.local import find_binary
from tandem.errors import ConfigError
from tandem.settings import loading
from tandem.settings.run import RunSettings


class Machine:
    """A folder that stands for the file systems of pods; runs the servers' programs on them."""

    def __init__(self, root: Path, models: Path, certs: Path) -> None:
        self._root = root
        self._models = models
        # A folder of `tandem certs`.
        self._certs = certs

    def problems(self, objects: Sequence[Object]) -> list[str]:
        """The refusals of the servers' programs (`--check-config`) and of the run's schema."""
        found = []
        for pod in pods(objects):
            if pod.component in SERVICES:
                found += self._server_problems(pod, objects)
            elif pod.component == "client":
                found += self._run_problems(pod, objects)
        return found

    def _server_problems(self, pod: Pod, objects: Sequence[Object]) -> list[str]:
        command = pod.command
        if command[0] != f"tandem-{pod.component}-server":
            return [f"{pod.name}: runs {command[0]}"]
        program = find_binary(command[0])
        local = self.mounts(pod, objects)
        arguments = [replaced(word, local) for word in [*command[1:], "--check-config"]]
        if "nvidia.com/gpu" in pod.container.get("resources", {}).get("limits", {}):
            arguments += ["--assume-gpu-memory", "80GB"]
        environment = {name: replaced(value, local) for name, value in pod.environment().items()}
        done = subprocess.run(
            [program, *arguments],
            env={"PATH": os.environ["PATH"]} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        problems = self._path_problems(pod, objects)
        # The memory of the machine that runs the tests is not that of the pod.
        if done.returncode != 0 and "GB are available" not in done.stderr:
            return [*problems, f"{pod.name}: {done.stderr.strip()}"]
        options = yaml.safe_load(done.stdout)["server"]
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        if ports != {"grpc": options["grpc_port"], "metrics": options["metrics_port"]}:
            problems.append(f"{pod.name}: ports {ports} are not those of its configuration")
        if options["host"] != "0.0.0.0":
            problems.append(f"{pod.name}: binds {options['host']}")
        if pod.spec["terminationGracePeriodSeconds"] <= options["drain_seconds"]:
            problems.append(f"{pod.name}: is killed before it has drained")
        probes = [
            pod.container[kind]["exec"]["command"]
            for kind in PROBES
            if "exec" in pod.container[kind]
        ]
        for flag in {word for probe in probes for word in probe if word.startswith("--")}:
            if flag not in _help(program):
                problems.append(f"{pod.name}: {command[0]} has no option {flag}")
        return problems

    def _path_problems(self, pod: Pod, objects: Sequence[Object]) -> list[str]:
        """Paths in the configuration that no volume has, or that are to be written and cannot."""
        problems = []
        mounts = {
            mount["mountPath"]: mount.get("readOnly", False)
            for mount in pod.container["volumeMounts"]
        }
        config = yaml.safe_load(_config(pod, objects))
        paths = [(str(key), value) for key, value in _leaves(config) if value.startswith("/")]
        paths.append(("TMPDIR", pod.environment().get("TMPDIR", "/tmp")))
        for key, path in paths:
            place = next((m for m in mounts if path == m or path.startswith(f"{m}/")), None)
            if place is None:
                problems.append(f"{pod.name}: {key}: {path} is on no volume")
            elif mounts[place] and key in ("TMPDIR", "shutdown_checkpoint_directory"):
                problems.append(f"{pod.name}: {key}: {path} cannot be written")
        return problems

    def _run_problems(self, pod: Pod, objects: Sequence[Object]) -> list[str]:
        program, command, file, *rest = pod.container["command"]
        if program != "tandem" or command not in ("train", "sft"):
            return [f"{pod.name}: runs {program} {command}"]
        if rest[:2] != ["--resume", "auto"]:
            return [f"{pod.name}: does not resume"]
        local = self.mounts(pod, objects)
        rest = rest[2:]
        if rest[0] == "--wait-for-lock":
            rest = rest[2:]
        overrides = [replaced(word, local) for word in rest]
        try:
            config = loading.load(RunSettings, Path(replaced(file, local)), overrides)
        except ConfigError as error:
            return [f"{pod.name}: {error}"]
        problems = []
        runs = local.get("/runs")
        if runs is None or not config.run_dir.is_relative_to(runs):
            problems.append(f"{pod.name}: run_dir is not on the volume of runs")
        wanted = {pod.component for pod in servers(objects)}
        told = {role for role in ("rollout", "trainer", "critic") if getattr(config.servers, role)}
        if told != wanted:
            problems.append(f"{pod.name}: is told of {sorted(told)}, not of {sorted(wanted)}")
        starts = [p for p in servers(objects) if p.component == "rollout"]
        first = [p for p in starts if p.environment().get("RANK", "0") == "0"]
        if len(config.servers.rollout or []) != len(first):
            problems.append(f"{pod.name}: is not told of all rollout servers")
        return problems

    def mounts(self, pod: Pod, objects: Sequence[Object]) -> dict[str, Path]:
        """Local folders by mount path, filled with what the cluster puts there."""
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        local = {}
        for mount in pod.container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if volume.get("persistentVolumeClaim", {}).get("claimName", "").endswith("models"):
                local[mount["mountPath"]] = self._models
                continue
            folder = self._root / pod.name / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            local[mount["mountPath"]] = folder
        for mount in pod.container["volumeMounts"]:
            folder, volume = local[mount["mountPath"]], volumes.get(mount["name"], {})
            if source := volume.get("configMap"):
                data = of_kind(objects, "ConfigMap").get(source["name"], {}).get("data", {})
                for name, text in data.items():
                    (folder / name).write_text(replaced(text, local))
            elif source := volume.get("secret"):
                self._fill_secret(folder, source)
        return local

    def _fill_secret(self, folder: Path, source: Object) -> None:
        """Writes the keys of a Secret: those of a certificate, or tokens where it lists items."""
        files = {"tls.crt": "server.crt", "tls.key": "server.key", "ca.crt": "ca.crt"}
        if "items" in source:
            tokens = {role: f"{role}.token" for role in ("reader", "user", "admin")}
            tokens |= {"client": "admin.token", "prometheus": "reader.token"}
            files = {item["path"]: tokens[item["key"]] for item in source["items"]}
        for path, file in files.items():
            shutil.copy(self._certs / file, folder / path)


def replaced(text: str, local: Mapping[str, Path]) -> str:
    """The text with paths below mounts replaced by those of this machine."""
    for path in sorted(local, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w-])", str(local[path]), text)
    return text


def _config(pod: Pod, objects: Sequence[Object]) -> str:
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    name = volumes["config"]["configMap"]["name"]
    return of_kind(objects, "ConfigMap")[name]["data"]["config.yaml"]


def _leaves(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _leaves(value, name)
    elif isinstance(values, list):
        for value in values:
            yield from _leaves(value, key)
    elif isinstance(values, str):
        yield key, values


@functools.cache
def _help(program: Path) -> str:
    return subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
