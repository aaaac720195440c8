"""The connections that NetworkPolicies allow."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from kubernetes_objects import Object, of_kind, pods, selects, servers


def arrows(objects: Sequence[Object], others: Mapping[str, Mapping[str, str]]) -> set[str]:
    """The connections that the NetworkPolicies allow, as "from → to:port"; "*" is every port.

    Args:
        objects: the objects of a release.
        others: labels of pods in other namespaces by name; the label `namespace` is that of theirs.
            What is no pod has the label `address` alone.
    """
    policies = [one["spec"] for one in of_kind(objects, "NetworkPolicy").values()]
    inside = {
        pod.component: dict(pod.labels) | {"namespace": pod.namespace} for pod in pods(objects)
    }
    everybody = inside | dict(others)
    ports = sorted(
        {port["containerPort"] for pod in servers(objects) for port in pod.container["ports"]}
        | {53, 443, 29500}
    )
    found = set()
    for source, from_labels in everybody.items():
        for target, to_labels in everybody.items():
            allowed = [
                port
                for port in ports
                if (
                    source not in inside
                    or _allows(policies, "egress", from_labels, to_labels, port)
                )
                and (
                    target not in inside
                    or _allows(policies, "ingress", to_labels, from_labels, port)
                )
            ]
            if source not in inside and target not in inside:
                continue
            shown = ["*"] if allowed == ports else allowed
            found |= {f"{source} → {target}:{port}" for port in shown}
    return found


def _allows(
    policies: Sequence[Object],
    direction: str,
    own: Mapping[str, str],
    peer: Mapping[str, str],
    port: int,
) -> bool:
    """Whether a pod may send to, or hear from, a peer at a port."""
    kind = direction.capitalize()
    rules = [
        policy.get(direction) or []
        for policy in policies
        if selects(policy["podSelector"].get("matchLabels", {}), own)
        and kind in policy["policyTypes"]
    ]
    key = "to" if direction == "egress" else "from"
    return not rules or any(
        _has_port(rule.get("ports"), port)
        and (key not in rule or any(_is_peer(one, own, peer) for one in rule[key]))
        for policy in rules
        for rule in policy
    )


def _has_port(ports: Sequence[Object] | None, port: int) -> bool:
    return ports is None or any(one["port"] == port for one in ports)


def _is_peer(selector: Object, own: Mapping[str, str], peer: Mapping[str, str]) -> bool:
    if "ipBlock" in selector or "address" in peer:
        block, address = selector.get("ipBlock"), peer.get("address")
        if block is None or address is None:
            return False
        return ipaddress.ip_address(address) in ipaddress.ip_network(block["cidr"])
    namespace = selector.get("namespaceSelector", {}).get("matchLabels")
    if namespace is None and own["namespace"] != peer["namespace"]:
        return False
    if namespace is not None and namespace != {"kubernetes.io/metadata.name": peer["namespace"]}:
        return False
    return selects(selector.get("podSelector", {}).get("matchLabels", {}), peer)
