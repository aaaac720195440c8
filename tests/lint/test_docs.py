"""Documents, examples and deployment files use the names that the code defines."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from check_layers import REPOSITORY
from tandem.openai_server import errors, fields

METRIC_NAMES = (REPOSITORY / "common/rpc/metric_names.h").read_text()
DOCUMENT = (REPOSITORY / "docs/metrics.md").read_text()
RANKS = (REPOSITORY / "docs/ranks.md").read_text()
README = (REPOSITORY / "README.md").read_text()
DASHBOARDS = sorted((REPOSITORY / "deploy").glob("**/*.json"))


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
    """The table of docs/metrics.md."""
    row = r"^\| `((?:grpc_server|process|tandem)_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$"
    return {
        name: Metric(kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in re.findall(row, DOCUMENT, re.M)
    }


def unknown_names(expression: str) -> set[str]:
    """Metric names of a PromQL expression that no server exports."""
    used = set(re.findall(r"\b((?:grpc_server|process|tandem)_\w+)", expression))
    return {
        name for name in used if re.sub(r"_(bucket|sum|count)$", "", name) not in exported_metrics()
    }


def test_the_table_of_metrics_is_that_of_the_code():
    exported = exported_metrics()
    assert exported["grpc_server_handling_seconds"].type == "histogram"
    assert exported["tandem_kv_tokens"].labels == ("lane",)
    assert documented_metrics() == exported


def test_names_of_metrics_follow_the_conventions():
    listed = METRIC_NAMES.count("MetricSpec k") + len(re.findall(r'\{"\w+/\w+"', METRIC_NAMES))
    assert len(exported_metrics()) == listed, "a name comes twice"
    for name, metric in exported_metrics().items():
        assert name.startswith(("tandem_", "grpc_server_", "process_"))
        assert name.endswith("_total") == (metric.type == "counter"), name
    assert all(metric.meaning.endswith(".") for metric in exported_metrics().values())


def test_every_key_of_metrics_jsonl_is_documented():
    from tandem import metrics

    section = DOCUMENT.split("## `evals.jsonl`")[0]
    assert set(metrics.KEYS + metrics.CRITIC_KEYS) == set(
        re.findall(
            r"`([a-z_0-9]+(?:/[a-z_0-9]+)*)`", "".join(re.findall(r"^\| (.*?) \|", section, re.M))
        )
    )


def expressions(dashboard: Path) -> list[str]:
    """The PromQL of every panel."""
    panels = json.loads(dashboard.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_use_only_exported_names(dashboard: Path):
    assert expressions(dashboard)
    assert {name for e in expressions(dashboard) for name in unknown_names(e)} == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_divide_only_where_the_divisor_is_positive(dashboard: Path):
    divisions = [e for e in expressions(dashboard) if " / " in e]
    assert divisions
    for expression in divisions:
        _, rest = expression.split(" / ")
        divisor, _, guard = rest.partition(" and ")
        assert guard == f"{divisor} > 0"


def own_metrics() -> set[str]:
    """Metrics that only rollout servers have: they may be summed over all servers."""
    section = METRIC_NAMES.split("// Rollout server.\n")[1].split("\n// ")[0]
    return set(re.findall(r'"(tandem_\w+)"', section))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_sum_metrics_of_several_roles_by_server(dashboard: Path):
    sums = [
        (labels, name)
        for expression in expressions(dashboard)
        for labels, name in re.findall(r"\bsum(?: by \(([^)]*)\))? ?\((?:rate\()?(\w+)", expression)
    ]
    assert sums
    assert not [
        name for labels, name in sums if name not in own_metrics() and "server" not in labels
    ]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_quantiles_leave_out_methods_without_calls(dashboard: Path):
    quantiles = [e for e in expressions(dashboard) if e.startswith("histogram_quantile")]
    assert quantiles
    for expression in quantiles:
        assert re.search(r" and sum .*_count\[5m\]\)\) > 0$", expression), expression


ALERTS = REPOSITORY / "deploy/prometheus/alerts.yml"


def alerts() -> list[dict]:
    """The rules of the alerts file."""
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]


def test_prometheus_loads_the_alerts():
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    assert [ALERTS.parent / name for name in config["rule_files"]] == [ALERTS]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alerts_use_exported_names_and_are_documented(rule):
    assert unknown_names(rule["expr"]) == set()
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    assert f"| `{rule['alert']}` |" in DOCUMENT


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alerts_compare_with_label_values_that_servers_export(rule):
    sources = "".join(file.read_text() for file in (REPOSITORY / "services").rglob("*.cc"))
    for label, value in re.findall(r'(\w+)="(\w+)"', rule["expr"]):
        assert label == "job" or f'"{value}"' in METRIC_NAMES + sources, value


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


def test_make_help_lists_the_commands_of_the_readme():
    commands = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    described = set(
        re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    )
    assert commands <= described


EXAMPLES = REPOSITORY / "examples"


def example(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/run*.yaml")), ids=example)
def test_example_runs_hold_valid_server_configurations(file: Path):
    from google.protobuf import json_format
    from tandem import settings
    from tandem.cluster import sections
    from tandem.config.v1 import server_config_pb2 as schema

    cluster = settings.load(settings.RunSettings, file).cluster
    assert cluster is not None
    for section in sections(cluster):
        assert section.ranks >= 1
        message = getattr(schema, f"{section.role.capitalize()}ServerConfig")()
        json_format.ParseDict(section.with_free_ports(), message)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/cluster*.yaml")), ids=example)
def test_example_clusters_are_valid(file: Path):
    from tandem import settings

    settings.load(settings.ClusterSettings, file)


def test_paths_in_the_commands_of_the_readme_exist():
    paths = set(re.findall(r"(?:examples|tests)/[\w./-]+\.(?:yaml|py|sh)", README))
    assert paths
    assert {path for path in paths if not (REPOSITORY / path).exists()} == set()


def links(document: Path) -> list[str]:
    """Targets of a document's links that are files of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    return [target for target in targets if "://" not in target]


DOCUMENTS = [
    *sorted(REPOSITORY.glob("*.md")),
    REPOSITORY / "clients/python/README.md",
    EXAMPLES / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_somewhere(document):
    missing = [link for link in links(document) if not (document.parent / link).exists()]
    assert missing == []


def test_the_variables_of_a_rank_are_those_that_servers_read():
    code = (REPOSITORY / "common/base/rank_environment.cc").read_text()
    table = re.findall(r"^\| `([A-Z_]+)` \|", RANKS, re.MULTILINE)
    assert sorted(table) == sorted(set(re.findall(r'Variable\("(\w+)"', code)))


def test_the_container_files_in_the_page_of_ranks_give_every_rank_its_variables():
    *_, compose, kubernetes = re.findall(r"^```yaml\n(.*?)^```$", RANKS, re.MULTILINE | re.DOTALL)
    services = yaml.safe_load(compose)["services"]
    ranks = [service["environment"]["RANK"] for service in services.values()]
    assert ranks == ["0", "1"]
    for service in services.values():
        assert service["environment"]["WORLD_SIZE"] == "2"
        assert service["environment"]["MASTER_ADDR"] == next(iter(services))
    service, stateful_set = yaml.safe_load_all(kubernetes)
    [container] = stateful_set["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert {"RANK", "LOCAL_WORLD_SIZE"} < set(variables)
    assert variables["WORLD_SIZE"] == str(stateful_set["spec"]["replicas"])
    name = service["metadata"]["name"]
    assert stateful_set["spec"]["serviceName"] == name
    assert variables["MASTER_ADDR"] == f"{stateful_set['metadata']['name']}-0.{name}"


def test_the_page_of_kernels_names_every_entry_and_every_kernel():
    folder = REPOSITORY / "common/kernels/cpu"
    header = (folder / "cpu_kernels.h").read_text()
    table = re.search(r"struct CpuKernels \{(.*?)\n\};", header, re.S)[1]
    entries = re.findall(r"(\w+)(?:\)\(const \w+&\))? = (?:nullptr|\{\})", table)
    sources = "".join(file.read_text() for file in folder.glob("*.cc") if "_test" not in file.name)
    kernels = re.findall(r'(?:\.name = |SimdKernels\()"(\w+)"', header + sources)
    assert {"linear", "bfloat16_product"} <= set(entries)
    assert {"portable", "aten", "amx"} <= set(kernels)
    page = set(re.findall(r"`(\w+)`", (REPOSITORY / "docs/kernels.md").read_text()))
    assert {*entries, *kernels} - page == set()


def test_every_field_of_the_objective_is_on_its_page():
    proto = (REPOSITORY / "proto/tandem/trainer/v1/objective.proto").read_text()
    fields = re.findall(r"^  (?:optional )?\w+ (\w+) = \d+;", proto, re.M)
    assert "clip_ratio_low" in fields
    page = set(re.findall(r"\w+", (REPOSITORY / "docs/objectives.md").read_text()))
    assert set(fields) - page == set()


def test_every_recipe_of_the_architecture_names_an_example():
    document = REPOSITORY / "docs/architecture.md"
    _, section = document.read_text().split("\n## Recipes\n")
    _, *recipes = re.split(r"^### ", section, flags=re.M)
    assert len(recipes) == 8
    for recipe in recipes:
        assert "Example:" in recipe, recipe.splitlines()[0]


def test_the_page_of_openais_api_names_its_fields_and_statuses():
    page = (REPOSITORY / "docs/openai.md").read_text()
    ignored, refused = (
        set(re.findall(r"`(\w+)`", re.search(rf"{words}[^:]*: ([^.]*)\.", page)[1]))
        for words in ("These are ignored", "These are refused")
    )
    assert ignored == fields.IGNORED
    assert refused == fields.REFUSED.keys()
    table = page[page.index("## Fields") : page.index("These are ignored")]
    followed = set(re.findall(r"`(\w+)", table))
    models = (fields.CompletionRequest, fields.ChatRequest)
    known = {name for model in models for name in model.model_fields} - {"prompt", "messages"}
    assert known <= followed
    rows = re.findall(r"^\| ([A-Z_, ;]+) \| ([\d; ]+)", page[page.index("## Errors") :], re.M)
    told = {}
    for codes, statuses in rows:
        groups = codes.split("; ")
        for group, status in zip(groups, statuses.split("; "), strict=True):
            told |= {code.strip(): int(status) for code in group.split(", ")}
    assert told == {code.name: int(status) for code, status in errors.HTTP_STATUS.items()}
