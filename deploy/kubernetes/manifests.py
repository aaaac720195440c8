"""Writes the files of deploy/kubernetes that follow from others, or checks that they are current.

    manifests.py update    writes them
    manifests.py check     fails when a file differs from what would be written

chart/values.schema.json: the definitions of the servers' configurations, from the descriptors of
proto/tandem/config/v1, without the settings that the chart sets itself. kustomize/base: the chart,
rendered with kustomize/values.yaml.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tandem._proto.config.v1 import server_config_pb2
from tandem.rpc.wire import enum_names
from tandem.settings.lanes import FLAT_NAMES

HERE = Path(__file__).resolve().parent
CHART = HERE / "chart"
SCHEMA = CHART / "values.schema.json"
KUSTOMIZE = HERE / "kustomize"
BASE = KUSTOMIZE / "base" / "resources.yaml"
# Name and namespace of the release in kustomize/base.
RELEASE = "tandem"

# Settings that are the chart's, by message: values with them are refused.
CHART_SETS = {
    "ServerOptions": {
        "host",
        "grpc_port",
        "metrics_port",
        "insecure",
        "drain_seconds",
        "advertised_address",
        "tls",
        "tokens",
        "path_roots",
        "private_network",
    },
    "TrainerServerConfig": {"critic_address"},
}
_TYPES = {
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_STRING: {"type": "string"},
    FieldDescriptor.TYPE_DOUBLE: {"type": "number"},
    FieldDescriptor.TYPE_INT32: {"type": "integer"},
    FieldDescriptor.TYPE_INT64: {"type": "integer"},
    FieldDescriptor.TYPE_UINT64: {"type": "integer", "minimum": 0},
}


def config_schema(message: Descriptor) -> dict[str, Any]:
    """Returns the JSON schema of a configuration: known keys alone, with their types."""
    own = CHART_SETS.get(message.name, set())
    fields = {field.name: _field(field) for field in message.fields if field.name not in own}
    for nested, flat in FLAT_NAMES.items():
        section, _, name = nested.partition(".")
        if section in message.fields_by_name and flat not in fields:
            lane = message.fields_by_name[section].message_type
            if lane is not None:
                fields[flat] = _field(lane.fields_by_name[name])
    return {"type": "object", "additionalProperties": False, "properties": fields}


def _field(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None:
        schema = config_schema(field.message_type)
    elif field.enum_type is not None:
        schema = {"enum": list(enum_names(field.enum_type))}
    else:
        schema = _TYPES[field.type]
    return {"type": "array", "items": schema} if field.is_repeated else schema


def values_schema() -> str:
    """Returns values.schema.json with the present definitions of the configurations."""
    schema = json.loads(SCHEMA.read_text())
    for role in ("Rollout", "Trainer", "Critic"):
        name = f"{role}ServerConfig"
        message = server_config_pb2.DESCRIPTOR.message_types_by_name[name]
        schema["definitions"][name] = config_schema(message)
    return json.dumps(schema, indent=2) + "\n"


def render(
    values: dict[str, Any], *, release: str = RELEASE, namespace: str = RELEASE
) -> dict[str, str]:
    """Returns the chart's rendered files by name. Raises helm_python.HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        return chart.render(values, name=release, namespace=namespace)


def manifests(rendered: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the objects in rendered files, in the order in which Helm's files have them."""
    texts = [text for name, text in sorted(rendered.items()) if not name.endswith("NOTES.txt")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def base() -> str:
    """Returns kustomize/base/resources.yaml."""
    objects = manifests(render(yaml.safe_load((KUSTOMIZE / "values.yaml").read_text())))
    for one in objects:
        labels = one["metadata"]["labels"]
        labels.pop("helm.sh/chart")
        labels["app.kubernetes.io/managed-by"] = "kustomize"
    head = "# Written by deploy/kubernetes/manifests.py from the chart and kustomize/values.yaml.\n"
    return head + yaml.safe_dump_all(objects, sort_keys=False, width=120)


def main(action: str) -> int:
    """Runs `update` or `check`; returns the exit code."""
    stale = 0
    for path, write in ((SCHEMA, values_schema), (BASE, base)):
        text = write()
        if path.exists() and path.read_text() == text:
            continue
        if action == "update":
            path.write_text(text)
        else:
            print(f"{path.relative_to(HERE)} is not current: run `make manifests`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    if sys.argv[1:] not in (["update"], ["check"]):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))
