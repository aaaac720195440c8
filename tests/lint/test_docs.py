"""Documents and deployment files use the names that the code defines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from check_layers import REPOSITORY

METRIC_NAMES = (REPOSITORY / "common/rpc/metric_names.h").read_text()
DOCUMENT = (REPOSITORY / "docs/metrics.md").read_text()
README = (REPOSITORY / "README.md").read_text()
DASHBOARDS = sorted((REPOSITORY / "deploy").glob("**/*.json"))


def exported_names() -> set[str]:
    """Every Prometheus name of the golden list, those of the step reports included."""
    specs = set(re.findall(r'"((?:grpc_server|tandem)_\w+)"', METRIC_NAMES))
    reports = re.findall(r'\{"([a-z_0-9]+/[a-z_0-9]+)",', METRIC_NAMES)
    names = {report.replace("/", "_") for report in reports}
    return specs | {n if n.startswith("tandem_") else f"tandem_{n}" for n in names}


def unknown_names(expression: str) -> set[str]:
    """Metric names of a PromQL expression that no server exports."""
    used = set(re.findall(r"\b((?:grpc_server|tandem)_\w+)", expression))
    return {
        name for name in used if re.sub(r"_(bucket|sum|count)$", "", name) not in exported_names()
    }


def test_every_exported_name_is_documented_and_no_other():
    documented = set(re.findall(r"^\| `((?:grpc_server|tandem)_\w+)` \|", DOCUMENT, re.MULTILINE))
    assert documented == exported_names()


def test_every_key_of_metrics_jsonl_is_documented():
    from tandem import metrics

    section = DOCUMENT.split("## Prometheus")[0]
    assert set(metrics.KEYS + metrics.CRITIC_KEYS) == set(
        re.findall(
            r"`([a-z_0-9]+(?:/[a-z_0-9]+)?)`", "".join(re.findall(r"^\| (.*?) \|", section, re.M))
        )
    )


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_use_only_exported_names(dashboard: Path):
    panels = json.loads(dashboard.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert expressions
    assert {name for e in expressions for name in unknown_names(e)} == set()


def test_an_unknown_name_is_found():
    assert unknown_names("rate(tandem_no_such_total[1m])") == {"tandem_no_such_total"}
    assert unknown_names("rate(grpc_server_handling_seconds_bucket[1m])") == set()


def test_the_scrape_file_names_the_default_metrics_ports():
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    targets = [
        t for job in config["scrape_configs"] for s in job["static_configs"] for t in s["targets"]
    ]
    documented = re.findall(r"^\| `tandem-\w+-server` \| \d+ \| (\d+) \|", README, re.MULTILINE)
    assert [target.split(":")[1] for target in targets] == documented


def test_links_of_the_documents_lead_somewhere():
    documents = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")]
    documents += [REPOSITORY / "clients/python/README.md"]
    documents += sorted((REPOSITORY / "docs").glob("**/*.md"))
    broken = [
        f"{document.name}: {link}"
        for document in documents
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text())
        if not (document.parent / link).exists()
    ]
    assert broken == []


def test_make_help_lists_the_commands_of_the_readme():
    commands = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    described = set(
        re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    )
    assert commands <= described


EXAMPLES = REPOSITORY / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/run*.yaml")), ids=str)
def test_example_runs_are_valid(file: Path):
    from tandem import settings

    run = settings.load(settings.RunSettings, file)
    assert run.cluster is None or (REPOSITORY / run.cluster).exists()


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/cluster*.yaml")), ids=str)
def test_example_clusters_hold_valid_server_configurations(file: Path):
    from google.protobuf import json_format
    from tandem import settings
    from tandem.config.v1 import server_config_pb2 as schema

    cluster = settings.load(settings.ClusterSettings, file)
    for section in cluster.rollout:
        json_format.ParseDict(section, schema.RolloutServerConfig())
    json_format.ParseDict(cluster.trainer or {}, schema.TrainerServerConfig())
    json_format.ParseDict(cluster.critic or {}, schema.CriticServerConfig())


def test_paths_in_the_commands_of_the_readme_exist():
    paths = set(re.findall(r"(?:examples|tests)/[\w./-]+\.(?:yaml|py|sh)", README))
    assert paths
    assert {path for path in paths if not (REPOSITORY / path).exists()} == set()
