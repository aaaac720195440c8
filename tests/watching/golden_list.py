"""The golden list of metrics, from metric_names.h and docs/reference/metrics.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
METRIC_NAMES = (REPOSITORY / "common/rpc/metrics/metric_names.h").read_text()
DOCUMENT = (REPOSITORY / "docs/reference/metrics.md").read_text()


@dataclass(frozen=True)
class Metric:
    """One row of the table of metrics."""

    type: str
    labels: tuple[str, ...]
    meaning: str


def server_metrics() -> dict[str, Metric]:
    """The metrics that servers register, from the specifications in metric_names.h."""
    spec = r"MetricSpec \w+\{\s*MetricType::k(\w+),(.*?)\};"
    metrics = {}
    for kind, body in re.findall(spec, METRIC_NAMES, re.S):
        texts, _, labels = body.partition("{")
        name, *meaning = re.findall(r'"([^"]*)"', texts)
        metrics[name] = Metric(
            kind.lower(), tuple(re.findall(r'"(\w+)"', labels)), "".join(meaning)
        )
    return metrics


def report_metrics() -> dict[str, Metric]:
    """The gauges of a step report, from metric_names.h, named as PrometheusName() names them."""
    reports = re.findall(r'\{"([a-z_0-9]+/[a-z_0-9]+)",\s*"([^"]*)"\}', METRIC_NAMES)
    names = {
        report.removesuffix("/total").replace("/", "_"): meaning for report, meaning in reports
    }
    return {
        name if name.startswith("tandem_") else f"tandem_{name}": Metric("gauge", (), meaning)
        for name, meaning in names.items()
    }


def exported_metrics() -> dict[str, Metric]:
    """Every Prometheus metric in metric_names.h."""
    return server_metrics() | report_metrics()


def documented_metrics() -> dict[str, Metric]:
    """The table of docs/reference/metrics.md."""
    row = r"^\| `((?:grpc_server|process|tandem)_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$"
    return {
        name: Metric(kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in re.findall(row, DOCUMENT, re.M)
    }
