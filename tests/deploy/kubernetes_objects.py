"""Objects of Kubernetes as mappings, and the pods that its controllers make of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1 import trainer_pb2

Object = Mapping[str, Any]

# Full name of each server's gRPC service.
SERVICES = {
    role: next(iter(module.DESCRIPTOR.services_by_name.values())).full_name
    for role, module in (("rollout", rollout_pb2), ("trainer", trainer_pb2), ("critic", critic_pb2))
}
COMPONENT = "app.kubernetes.io/component"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True)
class Pod:
    """A pod as its controller makes it: with its name, its labels and variables of its own."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    injected: Mapping[str, str]

    @property
    def component(self) -> str:
        """The role of a server, or `client` or `models`."""
        return self.labels[COMPONENT]

    @property
    def container(self) -> Mapping[str, Any]:
        """The container that does the work."""
        return self.spec["containers"][0]

    @property
    def command(self) -> list[str]:
        """The command of the container, or of a rank that ranks.sh starts in it."""
        command = [self._expanded(word, self._variables()) for word in self.container["command"]]
        return command[5:] if self.ranks_per_pod > 1 else command

    @property
    def ranks_per_pod(self) -> int:
        """The number of ranks that share the pod."""
        program, *arguments = self.container["command"]
        return int(arguments[0]) if program.endswith("/ranks.sh") else 1

    def environment(self) -> dict[str, str]:
        """The variables of the container, or of the first rank that ranks.sh starts in it."""
        values = self._variables()
        if self.ranks_per_pod == 1:
            return values
        _, count, world, master, port, *_ = self.container["command"]
        return values | {
            "RANK": str(int(values["POD_INDEX"]) * int(count)),
            "WORLD_SIZE": world,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": self._expanded(master, values),
            "MASTER_PORT": port,
        }

    def _variables(self) -> dict[str, str]:
        """The variables of the container, expanded as the kubelet does."""
        values = dict(self.injected)
        for variable in self.container.get("env", []):
            if "valueFrom" in variable:
                value = self._field(variable["valueFrom"]["fieldRef"]["fieldPath"])
            else:
                value = self._expanded(variable.get("value", ""), values)
            values[variable["name"]] = value
        return values

    @staticmethod
    def _expanded(text: str, values: Mapping[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda m: values.get(m[1], m[0]), text)

    def _field(self, path: str) -> str:
        if path == "metadata.name":
            return self.name
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        return self.labels.get(label[1], "") if label else ""


def of_kind(objects: Sequence[Object], kind: str) -> dict[str, Object]:
    """The objects of a kind by name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pods(objects: Sequence[Object]) -> list[Pod]:
    """The pods that the controllers of Kubernetes make of the objects."""
    return [pod for one in objects for pod in _pods_of(one)]


def _pods_of(one: Object) -> Iterator[Pod]:
    name, spec = one["metadata"]["name"], one.get("spec", {})
    namespace = one["metadata"].get("namespace", "tandem")

    def pod(
        template: Object, name: str, labels: Mapping[str, str], injected: Mapping[str, str]
    ) -> Pod:
        labels = template["metadata"]["labels"] | labels
        return Pod(name, namespace, labels, template["spec"], injected)

    if one["kind"] == "Job":
        yield pod(spec["template"], name, {}, {})
    elif one["kind"] == "StatefulSet":
        for index in range(spec["replicas"]):
            label = {"apps.kubernetes.io/pod-index": str(index)}
            yield pod(spec["template"], f"{name}-{index}", label, {})
    elif one["kind"] == "LeaderWorkerSet":
        template = spec["leaderWorkerTemplate"]
        for group in range(spec["replicas"]):
            leader = f"{name}-{group}"
            for rank in range(template["size"]):
                label = {"leaderworkerset.sigs.k8s.io/worker-index": str(rank)}
                injected = {"LWS_LEADER_ADDRESS": f"{leader}.{name}.{namespace}"}
                place = f"{leader}-{rank}" if rank else leader
                yield pod(template["workerTemplate"], place, label, injected)


def servers(objects: Sequence[Object]) -> list[Pod]:
    """The pods of servers."""
    return [pod for pod in pods(objects) if pod.component in SERVICES]


def selects(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a selector's labels are among those of an object."""
    return wanted.items() <= labels.items()


def changed(objects: Sequence[Object], kind: str, name: str, path: str, value: Any) -> list[Any]:
    """A copy of the objects in which one field of one object has another value.

    Args:
        objects: the objects of a release.
        kind: kind of the object to change.
        name: name of that object, or how it begins.
        path: keys and numbers of list items, separated by slashes; ~1 is a slash inside a key.
        value: the new value; None removes the field.
    """
    copies = copy.deepcopy(list(objects))
    [one] = [o for o in copies if o["kind"] == kind and o["metadata"]["name"].startswith(name)]
    keys = [key.replace("~1", "/") for key in path.split("/")]
    *way, last = [int(key) if key.isdigit() else key for key in keys]
    for key in way:
        one = one[key]
    if value is None:
        del one[last]
    else:
        one[last] = value
    return copies
