"""Schemas of the custom resources that the chart renders: the fields that it may use.

Kubernetes has no schemas of these kinds. Field names and types are those of LeaderWorkerSet 0.9,
of the Prometheus operator's v1 and of cert-manager's v1.
"""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_WHOLE: dict[str, Any] = {"type": "integer"}


def _object(required: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _resource(spec: dict[str, Any]) -> dict[str, Any]:
    return _object(
        "apiVersion kind metadata spec",
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata={"type": "object"},
        spec=spec,
    )


_SECRET_KEY = _object("name key", name=_TEXT, key=_TEXT)
_RELABELING = _object(
    "targetLabel",
    sourceLabels=_list(_TEXT),
    regex=_TEXT,
    targetLabel=_TEXT,
    replacement=_TEXT,
)
_ENDPOINT = _object(
    "port",
    port=_TEXT,
    interval=_TEXT,
    scheme={"enum": ["http", "https"]},
    relabelings=_list(_RELABELING),
    tlsConfig=_object(
        serverName=_TEXT,
        ca=_object(secret=_SECRET_KEY),
        cert=_object(secret=_SECRET_KEY),
        keySecret=_SECRET_KEY,
    ),
    authorization=_object(credentials=_SECRET_KEY),
)
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_RULE = _object(
    "expr",
    alert=_TEXT,
    record=_TEXT,
    expr=_TEXT,
    labels=_LABELS,
    annotations=_LABELS,
    **{"for": _TEXT, "keep_firing_for": _TEXT},
)

SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _resource(
        _object(
            "leaderWorkerTemplate",
            replicas=_WHOLE,
            networkConfig=_object(
                "subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}
            ),
            leaderWorkerTemplate=_object(
                "workerTemplate",
                size=_WHOLE,
                restartPolicy={
                    "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                },
                workerTemplate={"type": "object"},
            ),
        )
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(
        _object(
            "selector endpoints", selector=_object(matchLabels=_LABELS), endpoints=_list(_ENDPOINT)
        )
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _resource(
        _object(groups=_list(_object("name rules", name=_TEXT, interval=_TEXT, rules=_list(_RULE))))
    ),
    ("cert-manager.io/v1", "Certificate"): _resource(
        _object(
            "secretName issuerRef",
            secretName=_TEXT,
            issuerRef=_object("name", name=_TEXT, kind=_TEXT, group=_TEXT),
            usages=_list(
                {"enum": ["server auth", "client auth", "digital signature", "key encipherment"]}
            ),
            dnsNames=_list(_TEXT),
            ipAddresses=_list(_TEXT),
        )
    ),
}
