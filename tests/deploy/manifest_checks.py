"""Checks of the objects of a release, with each other and with Kubernetes.

Each returns the list of what is wrong, empty if nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jsonschema
import kubernetes_validate
import yaml
from custom_resources import SCHEMAS
from kubernetes_objects import PROBES, SERVICES, Object, of_kind, pods, selects, servers

# The oldest release that the chart allows, one in the middle, and the newest with schemas.
KUBERNETES_VERSIONS = ("1.32", "1.34", "1.37")
_ADDRESS = re.compile(r"[\w.-]+\.svc(?::\d+)?")


def schema_problems(objects: Sequence[Object]) -> list[str]:
    """Objects that the API server would refuse or whose fields it would drop."""
    problems = []
    for one in objects:
        where = f"{one['kind']} {one['metadata'].get('name')}"
        if own := SCHEMAS.get((one["apiVersion"], one["kind"])):
            found = jsonschema.Draft202012Validator(own).iter_errors(one)
            problems += [f"{where}: {error.json_path}: {error.message}" for error in found]
            if one["kind"] == "LeaderWorkerSet" and not problems:
                problems += schema_problems([_as_stateful_set(one)])
            continue
        for version in KUBERNETES_VERSIONS:
            try:
                kubernetes_validate.validate(dict(one), version, strict=True)
            except (
                kubernetes_validate.ValidationError,
                kubernetes_validate.SchemaNotFoundError,
            ) as error:
                problems.append(f"{where} ({version}): {error}")
    return problems


def _as_stateful_set(group: Object) -> Object:
    """A StatefulSet with the pods of a LeaderWorkerSet, whose schema is known."""
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": group["metadata"],
        "spec": {
            "serviceName": group["metadata"]["name"],
            "selector": {"matchLabels": template["metadata"]["labels"]},
            "template": template,
        },
    }


def security_problems(objects: Sequence[Object]) -> list[str]:
    """Pods that do not meet the restricted Pod Security Standard, or whose root can be written."""
    problems = []
    for pod in pods(objects):
        own = pod.spec.get("securityContext", {})
        wanted = {
            "runAsNonRoot": own.get("runAsNonRoot") is True,
            "runAsUser": own.get("runAsUser", 1) != 0,
            "seccompProfile": own.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "hostNetwork": not any(
                pod.spec.get(f"host{kind}") for kind in ("Network", "PID", "IPC")
            ),
            "automountServiceAccountToken": pod.spec.get("automountServiceAccountToken") is False,
            "volumes": all(
                set(volume) - {"name"}
                <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
                for volume in pod.spec.get("volumes", [])
            ),
        }
        for container in [*pod.spec.get("initContainers", []), *pod.spec["containers"]]:
            context = container.get("securityContext", {})
            wanted |= {
                f"{container['name']}.{field}": context.get(field) == value
                for field, value in (
                    ("allowPrivilegeEscalation", False),
                    ("readOnlyRootFilesystem", True),
                    ("capabilities", {"drop": ["ALL"]}),
                )
            }
            # A setting here wins over the pod's.
            for field in ("runAsNonRoot", "runAsUser", "seccompProfile", "privileged", "procMount"):
                wanted[f"{container['name']}.{field}"] = field not in context
        problems += [f"{pod.name}: {field}" for field, good in wanted.items() if not good]
    return problems


def volume_problems(objects: Sequence[Object], given: Sequence[str] = ()) -> list[str]:
    """Volumes that name what is not there, or that no container mounts.

    Args:
        objects: the objects of a release.
        given: names of claims and Secrets that exist before the release.
    """
    problems = []
    made = {
        "configMap": of_kind(objects, "ConfigMap"),
        "persistentVolumeClaim": {*of_kind(objects, "PersistentVolumeClaim"), *given},
        "secret": {
            *(one["spec"]["secretName"] for one in of_kind(objects, "Certificate").values()),
            *given,
        },
    }
    key = {"configMap": "name", "persistentVolumeClaim": "claimName", "secret": "secretName"}
    for pod in pods(objects):
        names = set()
        for volume in pod.spec.get("volumes", []):
            names.add(volume["name"])
            for kind, source in volume.items():
                if kind in key and source[key[kind]] not in made[kind]:
                    problems.append(f"{pod.name}: {kind} {source[key[kind]]} does not exist")
        used = set()
        for container in [*pod.spec.get("initContainers", []), *pod.spec["containers"]]:
            mounted = [mount["name"] for mount in container.get("volumeMounts", [])]
            problems += [
                f"{pod.name}: mount {name} is no volume" for name in mounted if name not in names
            ]
            used.update(mounted)
        problems += [f"{pod.name}: volume {name} is not mounted" for name in names - used]
    return problems


def selector_problems(objects: Sequence[Object]) -> list[str]:
    """Labels, ports and names of Services that fit no pod, or the pods of another."""
    problems = []
    everything = pods(objects)
    for name, one in of_kind(objects, "Service").items():
        selected = [pod for pod in everything if selects(one["spec"]["selector"], pod.labels)]
        if not selected:
            problems.append(f"Service {name}: selects no pod")
        for port in one["spec"]["ports"]:
            for pod in selected:
                ports = {p["name"]: p["containerPort"] for p in pod.container["ports"]}
                if ports.get(port["targetPort"]) != port["port"]:
                    problems.append(
                        f"Service {name}: port {port['port']} is not that of {pod.name}"
                    )
    for kind in ("PodDisruptionBudget", "StatefulSet"):
        for name, one in of_kind(objects, kind).items():
            labels = one["spec"]["selector"]["matchLabels"]
            if not any(selects(labels, pod.labels) for pod in everything):
                problems.append(f"{kind} {name}: selects no pod")
    services = of_kind(objects, "Service")
    for name, one in of_kind(objects, "StatefulSet").items():
        if one["spec"]["serviceName"] not in services:
            problems.append(f"StatefulSet {name}: no Service {one['spec']['serviceName']}")
        others = {pod.name for pod in everything if not pod.name.startswith(f"{name}-")}
        labels = one["spec"]["selector"]["matchLabels"]
        both = [p.name for p in everything if p.name in others and selects(labels, p.labels)]
        if both:
            problems.append(f"StatefulSet {name}: selects {both}, pods of another set")
    for name in of_kind(objects, "LeaderWorkerSet"):
        if name not in services:
            problems.append(f"LeaderWorkerSet {name}: no Service of its name")
    for name, one in of_kind(objects, "ServiceMonitor").items():
        labels = one["spec"]["selector"]["matchLabels"]
        selected = [s for s in services.values() if selects(labels, s["metadata"]["labels"])]
        ports = {port["name"] for service in selected for port in service["spec"]["ports"]}
        for endpoint in one["spec"]["endpoints"]:
            if endpoint["port"] not in ports:
                problems.append(
                    f"ServiceMonitor {name}: no Service has the port {endpoint['port']}"
                )
    return problems


def address_problems(objects: Sequence[Object]) -> list[str]:
    """Addresses in configurations, arguments and variables that are no pod's, or another port's."""
    problems = []
    everything = servers(objects)
    services = of_kind(objects, "Service")
    ports = {}
    for pod in everything:
        grpc = {port["name"]: port["containerPort"] for port in pod.container["ports"]}["grpc"]
        for name, service in services.items():
            if selects(service["spec"]["selector"], pod.labels):
                ports[f"{pod.name}.{name}.{pod.namespace}.svc"] = grpc
    texts = {
        f"ConfigMap {name}": yaml.safe_dump(one["data"])
        for name, one in of_kind(objects, "ConfigMap").items()
        if not name.endswith("-dashboards")
    }
    for pod in pods(objects):
        texts[pod.name] = yaml.safe_dump([pod.container.get("command"), pod.environment()])
    for name, one in of_kind(objects, "ServiceMonitor").items():
        texts[f"ServiceMonitor {name}"] = yaml.safe_dump(one["spec"])
    for where, text in texts.items():
        for address in _ADDRESS.findall(text):
            host, _, port = address.partition(":")
            if host not in ports:
                problems.append(f"{where}: {host} is no pod's name")
            elif port and int(port) != ports[host]:
                problems.append(f"{where}: {address}: the server is at port {ports[host]}")
    for name, one in of_kind(objects, "Certificate").items():
        named = one["spec"]["dnsNames"]
        problems += [
            f"Certificate {name}: does not name {host}"
            for host in ports
            if f"*.{host.partition('.')[2]}" not in named
        ]
    return problems


def probe_problems(objects: Sequence[Object]) -> list[str]:
    """Probes that ask another port or service, or that the time of a stop contradicts."""
    problems = []
    for pod in servers(objects):
        grpc = {port["name"]: port["containerPort"] for port in pod.container["ports"]}["grpc"]
        for kind in PROBES:
            probe = pod.container.get(kind)
            if probe is None:
                problems.append(f"{pod.name}: has no {kind}")
            elif "exec" in probe:
                flag = "--check-liveness" if kind == "livenessProbe" else "--check-health"
                if probe["exec"]["command"] != [*pod.command, flag]:
                    problems.append(f"{pod.name}: {kind} asks another configuration's server")
            elif probe.get("grpc") != {
                "port": grpc,
                "service": "liveness" if kind == "livenessProbe" else SERVICES[pod.component],
            }:
                problems.append(f"{pod.name}: {kind} asks {probe.get('grpc')}")
    return problems


def metric_problems(objects: Sequence[Object], known: set[str]) -> list[str]:
    """Names of metrics in rules and dashboards that no server exports."""
    texts = {
        f"PrometheusRule {name}": [
            rule["expr"] for group in one["spec"]["groups"] for rule in group["rules"]
        ]
        for name, one in of_kind(objects, "PrometheusRule").items()
    }
    for name, one in of_kind(objects, "ConfigMap").items():
        if name.endswith("-dashboards"):
            texts[f"ConfigMap {name}"] = [
                expression
                for dashboard in one["data"].values()
                for expression in re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', dashboard)
            ]
    problems = []
    for where, expressions in texts.items():
        if not expressions:
            problems.append(f"{where}: has no expression")
        names = {
            name
            for text in expressions
            for name in re.findall(r"(?<![\w:])(?:tandem|grpc_server|process)_\w+(?![\w:])", text)
        }
        bare = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
        problems += [
            f"{where}: {name} is no metric"
            for name in sorted(names)
            if not {name, bare[name]} & known
        ]
    return problems
