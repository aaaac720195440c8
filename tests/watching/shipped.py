"""The shipped dashboards, rules and configurations, and what their PromQL names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from golden_list import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
ALERTMANAGER = DEPLOY / "alertmanager/alertmanager.yml"
# Variables that Grafana itself sets; $__rate_interval is 4 scrapes.
BUILT_IN = {"__rate_interval": "20s", "__from": "0", "__to": "0"}


def rules(file: str) -> list[dict[str, Any]]:
    """The rules of deploy/prometheus/rules/<file>.yml."""
    groups = yaml.safe_load((PROMETHEUS / f"rules/{file}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@dataclass(frozen=True)
class Query:
    """A PromQL expression of a dashboard; `text` has Grafana's variables."""

    dashboard: str
    panel: str
    legend: str
    text: str

    def __str__(self) -> str:
        return f"{self.dashboard}/{self.panel}/{self.legend}".replace(" ", "-")

    def with_variables(self, **values: str) -> str:
        """The expression with values for its variables; ".*" for those that are not given."""
        return substitute(self.text, values)


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Puts values into $name and ${name}, as Grafana does; ".*" for names without one."""
    known = BUILT_IN | dict(values)
    return re.sub(r"\$\{?([\w.]+)\}?", lambda found: known.get(found[1], ".*"), text)


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard, without its rows."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def queries() -> list[Query]:
    """The queries of all panels."""
    return [
        Query(file.stem, panel["title"], target["legendFormat"], target["expr"])
        for file in DASHBOARDS
        for panel in panels(file)
        for target in panel["targets"]
    ]


def nodes(expression: str) -> list[Any]:
    """The nodes of the syntax tree of a PromQL expression."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """The metric names of a PromQL expression, each with its matchers: label to value."""
    return [
        (node.name, {m.name: m.value for m in node.matchers.matchers})
        for node in nodes(expression)
        if isinstance(node, promql_parser.VectorSelector)
    ]


def program(name: str) -> Path:
    """A program of Prometheus or Alertmanager, which setup/prometheus.sh fetches if need be."""
    subprocess.run([REPOSITORY / "setup/prometheus.sh"], check=True)
    fetched = REPOSITORY / ".cache/prometheus/usr/bin" / name
    found = fetched if fetched.exists() else shutil.which(name)
    assert found, f"{name} is neither in {fetched.parent} nor on the PATH"
    return Path(found)


def run(name: str, *arguments: str | Path) -> str:
    """Runs a program of Prometheus or Alertmanager; returns its output, and fails if it does."""
    done = subprocess.run(
        [program(name), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
