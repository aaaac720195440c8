"""Dashboards, rules and configurations are valid, consistent, and name only what servers export."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import urllib.parse
from pathlib import Path

import grpc
import promql_parser
import pytest
import shipped
import yaml
from golden_list import DOCUMENT, METRIC_NAMES, REPOSITORY, documented_metrics

RECORDED = {rule["record"]: rule for rule in shipped.rules("recording")}
ALERTS = {rule["alert"]: rule for rule in shipped.rules("alerts")}
# Labels of a target, of a histogram's bucket, and of the series that Prometheus makes itself.
TARGET_LABELS = {"cluster", "server", "rank", "instance", "job"}
OWN_SERIES = {"up": {"job"}, "ALERTS": {"alertstate", "alertname", "severity"}}
# Expressions by name, of every dashboard and of the rules.
EXPRESSIONS = {
    file.stem: {
        str(query): query.with_variables()
        for query in shipped.queries()
        if query.dashboard == file.stem
    }
    for file in shipped.DASHBOARDS
} | {"rules": {name: rule["expr"] for name, rule in (RECORDED | ALERTS).items()}}
EVERY_SOURCE = pytest.mark.parametrize("expressions", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())


def labels_of(metric: str) -> set[str] | None:
    """The labels that a series has besides those of its target; None for an unknown metric."""
    if metric in OWN_SERIES:
        return OWN_SERIES[metric]
    if metric in RECORDED:
        return set(re.findall(r"by \(([^)]*)\)", RECORDED[metric]["expr"])[0].split(", "))
    base = re.sub(r"_(bucket|sum|count)$", "", metric)
    found = documented_metrics().get(metric)
    if found is None and (found := documented_metrics().get(base)) and found.type != "histogram":
        found = None
    return set(found.labels) if found else None


def unknown(expression: str) -> list[str]:
    """The metrics, labels and label values of an expression that no server exports."""
    sources = METRIC_NAMES + "".join(
        file.read_text() for file in (REPOSITORY / "services").rglob("*.cc")
    )
    found = []
    for metric, matchers in shipped.selectors(expression):
        labels = labels_of(metric)
        if labels is None:
            found.append(metric)
            continue
        for label, value in matchers.items():
            if label not in labels | TARGET_LABELS:
                found.append(f"{metric}{{{label}}}")
            elif label == "grpc_code":
                wrong = [
                    code for code in value.split("|") if code not in grpc.StatusCode.__members__
                ]
                found += [f'{metric}{{{label}="{code}"}}' for code in wrong]
            elif label == "position":  # of a draft behind the last token
                if value not in map(str, range(1, 16)):
                    found.append(f'{metric}{{{label}="{value}"}}')
            # A metric that a rule or Prometheus itself makes has labels of its own.
            elif (
                label in labels - TARGET_LABELS - {"grpc_method"}
                and metric not in OWN_SERIES
                and f'"{value}"' not in sources
            ):
                found.append(f'{metric}{{{label}="{value}"}}')
    return found


@EVERY_SOURCE
def test_expressions_name_what_servers_export(expressions, subtests):
    for name, expression in expressions.items():
        with subtests.test(name):
            assert unknown(expression) == []


def test_what_no_server_exports_is_found():
    assert unknown("rate(tandem_no_such_total[1m])") == ["tandem_no_such_total"]
    assert unknown("rate(grpc_server_handling_seconds_bucket[1m])") == []
    assert unknown("tandem_weights_version_count") == ["tandem_weights_version_count"]
    assert unknown('tandem_kv_tokens{author="senior"}') == ["tandem_kv_tokens{author}"]
    assert unknown('tandem_train_steps_total{result="nan"}') == [
        'tandem_train_steps_total{result="nan"}'
    ]
    assert unknown('grpc_server_handled_total{grpc_code=~"OK|DATALOSS"}') == [
        'grpc_server_handled_total{grpc_code="DATALOSS"}'
    ]


def test_recorded_series_are_used():
    users = [query.text for query in shipped.queries()] + [rule["expr"] for rule in ALERTS.values()]
    assert [name for name in RECORDED if not any(name in text for text in users)] == []


@EVERY_SOURCE
def test_divisions_have_no_value_where_the_divisor_is_zero(expressions, subtests):
    for name, expression in expressions.items():
        nodes = shipped.nodes(expression)
        binary = [node for node in nodes if isinstance(node, promql_parser.BinaryExpr)]
        divisions = {node.prettify(): node for node in binary if str(node.op) == "/"}
        guards = {one.lhs.prettify(): one.rhs.prettify() for one in binary if str(one.op) == "and"}
        for text, division in divisions.items():
            divisor = promql_parser.parse(f"{division.rhs.prettify()} > 0").prettify()
            with subtests.test(name):
                assert guards.get(text) == divisor


def test_sums_and_quantiles_keep_servers_apart():
    # Metrics of rollout servers alone.
    section = METRIC_NAMES.split("// Rollout server.\n")[1].split("\n// ")[0]
    own = set(re.findall(r'"(tandem_\w+)"', section))
    sums = 0
    for name, expression in itertools.chain(*(one.items() for one in EXPRESSIONS.values())):
        for node in shipped.nodes(expression):
            if isinstance(node, promql_parser.AggregateExpr) and str(node.op) == "sum":
                sums += 1
                metrics = {metric for metric, _ in shipped.selectors(node.prettify())}
                assert metrics <= own or "server" in node.modifier.labels, name
    assert sums > 10


# Dashboards

# Ids of Grafana's units.
UNITS = {"none", "s", "bytes", "Bps", "percentunit", "cps", "opm", "reqps", "sci"}


def generated() -> dict[Path, str]:
    """The files that deploy/grafana/generate.py writes."""
    spec = importlib.util.spec_from_file_location(
        "generate", shipped.DEPLOY / "grafana/generate.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.dashboards())


def test_the_dashboards_are_those_of_their_list():
    made = generated()
    assert sorted(made) == shipped.DASHBOARDS
    for file, text in made.items():
        assert file.read_text() == text, f"{file.name}: run deploy/grafana/generate.py"


@pytest.mark.parametrize("file", shipped.DASHBOARDS, ids=lambda file: file.stem)
def test_panels_are_described_and_do_not_overlap(file):
    taken: set[tuple[int, int]] = set()
    dashboard = json.loads(file.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    for panel in shipped.panels(file):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["targets"], panel["title"]


@pytest.mark.parametrize("file", shipped.DASHBOARDS, ids=lambda file: file.stem)
def test_variables_are_defined(file):
    text = file.read_text()
    defined = {variable["name"] for variable in json.loads(text)["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__all"}
    assert used <= defined | shipped.BUILT_IN.keys() | {"__value", "__field"}


def log_links(file: Path) -> list[str]:
    """The addresses of log lines in a dashboard, those of the dashboard itself and of points."""
    dashboard = json.loads(file.read_text())
    links = [*dashboard["links"]]
    for panel in shipped.panels(file):
        links += panel["fieldConfig"]["defaults"].get("links", [])
    return [link["url"] for link in links if "url" in link]


@pytest.mark.parametrize("file", shipped.DASHBOARDS, ids=lambda file: file.stem)
def test_links_to_logs_are_searches_by_step_and_request(file):
    fields = set()
    for url in log_links(file):
        query = urllib.parse.urlsplit(shipped.substitute(url, {"logs": "loki-uid"})).query
        [panes] = urllib.parse.parse_qs(query)["panes"]
        pane = json.loads(panes)["logs"]
        assert pane["datasource"] == "loki-uid"
        fields |= set(re.findall(r"(\w+)=`", pane["queries"][0]["expr"]))
    assert {"request_id", "step", "version"} <= fields


def test_dashboards_link_to_each_other():
    for file in shipped.DASHBOARDS:
        dashboard = json.loads(file.read_text())
        [link] = [link for link in dashboard["links"] if link["type"] == "dashboards"]
        assert link["tags"] == dashboard["tags"]


def test_grafana_is_provisioned_with_the_scrape_interval_of_prometheus():
    provisioning = shipped.DEPLOY / "grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/tandem.yml").read_text())["datasources"]
    intervals = {
        yaml.safe_load(file.read_text())["global"]["scrape_interval"]
        for file in shipped.PROMETHEUS.glob("*.yml")
        if file.name != "targets.yml"
    }
    assert intervals == {sources[0]["jsonData"]["timeInterval"]}
    [provider] = yaml.safe_load((provisioning / "dashboards/tandem.yml").read_text())["providers"]
    assert f"`{provider['options']['path']}`" in DOCUMENT


# Rules and configurations


def test_alerts_say_what_is_wrong_and_where_the_remedy_is(subtests):
    for name, rule in ALERTS.items():
        with subtests.test(name):
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert "for" in rule
            assert rule["annotations"]["summary"].endswith(".")
            assert rule["annotations"]["description"].endswith(".")
            assert rule["annotations"]["runbook"] == f"docs/reference/metrics.md#{name.lower()}"
            assert f"\n### {name}\n" in DOCUMENT


def test_every_remedy_is_of_an_alert():
    assert set(re.findall(r"^### (Tandem\w+)$", DOCUMENT, re.M)) == set(ALERTS)


def test_the_scrape_file_names_the_default_metrics_ports():
    config = yaml.safe_load((shipped.PROMETHEUS / "prometheus.yml").read_text())
    targets = [
        t for job in config["scrape_configs"] for s in job["static_configs"] for t in s["targets"]
    ]
    page = (REPOSITORY / "docs/getting-started/quickstart.md").read_text()
    documented = re.findall(r"^\| `tandem-\w+-server` \| \d+ \| (\d+) \|", page, re.MULTILINE)
    assert [target.split(":")[1] for target in targets] == documented


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-tls.yml", "compose.yml"])
def test_promtool_accepts_the_configurations(name, tmp_path):
    directory = shutil.copytree(shipped.PROMETHEUS, tmp_path / "prometheus")
    config = yaml.safe_load((directory / name).read_text())
    (directory / "secrets").mkdir()
    for secret in re.findall(r"secrets/[\w.-]+", (directory / name).read_text()):
        (directory / secret).touch()
    output = shipped.run("promtool", "check", "config", directory / name)
    assert "2 rule files found" in output
    assert {job["job_name"] for job in config["scrape_configs"]} == {"tandem"}


def test_promtool_accepts_the_targets_of_the_file(tmp_path):
    [*targets] = yaml.safe_load((shipped.PROMETHEUS / "targets.yml").read_text())
    assert all(TARGET_LABELS - {"instance", "job"} == set(one["labels"]) for one in targets)


def test_promtool_accepts_the_rules():
    files = sorted((shipped.PROMETHEUS / "rules").glob("*.yml"))
    output = shipped.run("promtool", "check", "rules", "--lint=all", "--lint-fatal", *files)
    assert f"{len(ALERTS)} rules found" in output


def test_amtool_accepts_the_configuration():
    assert "SUCCESS" in shipped.run("amtool", "check-config", shipped.ALERTMANAGER)


UNIT_TESTS = Path(__file__).with_name("alerts_test.yml")


def test_alerts_fire_when_they_should_and_only_then():
    shipped.run("promtool", "test", "rules", UNIT_TESTS)


def test_every_alert_is_tested_to_fire_and_not_to():
    fired = {name: set() for name in ALERTS}
    for group in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for case in group["alert_rule_test"]:
            fired[case["alertname"]].add(bool(case["exp_alerts"]))
    assert fired == {name: {True, False} for name in ALERTS}
