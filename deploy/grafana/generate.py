"""Writes deploy/grafana/dashboards/*.json from dashboards.yml, which also says how to edit panels.

.venv/bin/python deploy/grafana/generate.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model

DIRECTORY = Path(__file__).parent
_PROMETHEUS = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "tandem"
_HEIGHT = 7

_PanelBuilder = timeseries.Panel | stat.Panel | statetimeline.Panel


def dashboards() -> Iterator[tuple[Path, str]]:
    """Yields the file of every dashboard and its text."""
    for board in yaml.safe_load((DIRECTORY / "dashboards.yml").read_text()):
        text = json.dumps(_dashboard(board).build(), cls=JSONEncoder, indent=1)
        yield DIRECTORY / "dashboards" / f"{board['uid']}.json", text + "\n"


def _dashboard(board: Mapping[str, Any]) -> build.Dashboard:
    dashboard = (
        build.Dashboard(board["title"])
        .uid(board["uid"])
        .description(board["about"])
        .tags([_TAG])
        .refresh("5s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    matchers = ['job="tandem"']
    for label in board["variables"]:
        series = f"up{{{', '.join(matchers)}}}"
        dashboard.with_variable(_label_variable(label, series, one=label == board.get("one")))
        matchers.append(f'{label}=~"${label}"')
    dashboard.with_variable(build.DatasourceVariable("logs").label("Logs").type("loki"))
    for name, label in (("request_id", "Request id"), ("step", "Step")):
        dashboard.with_variable(build.TextBoxVariable(name).label(label))
        dashboard.link(
            build.DashboardLink(f"Logs of this {label.lower()}")
            .type(model.DashboardLinkType.LINK)
            .icon("doc")
            .url(_logs_url({name: f"${{{name}}}"}))
            .target_blank(True)
        )
    dashboard.link(
        build.DashboardLink("Tandem")
        .type(model.DashboardLinkType.DASHBOARDS)
        .icon("external link")
        .tags([_TAG])
        .include_vars(True)
        .keep_time(True)
    )
    dashboard.annotation(
        build.AnnotationQuery()
        .name("Alerts")
        .datasource(_PROMETHEUS)
        .enable(True)
        .icon_color("red")
        .expr(_query('ALERTS{alertstate="firing", *}', board))
    )
    number = 0
    for row in board["rows"]:
        number += 1
        dashboard.with_row(build.Row(row["title"]).id(number))
        for panel in row["panels"]:
            number += 1
            dashboard.with_panel(_panel(panel, board).id(number))
    return dashboard


def _label_variable(label: str, series: str, *, one: bool) -> build.QueryVariable:
    variable = (
        build.QueryVariable(label)
        .label(label.capitalize())
        .datasource(_PROMETHEUS)
        .query(f"label_values({series}, {label})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    if one:
        return variable
    everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    # With `.*` a target without the label is shown, too.
    return variable.multi(True).include_all(True).all_value(".*").current(everything)


def _panel(panel: Mapping[str, Any], board: Mapping[str, Any]) -> _PanelBuilder:
    made = _KINDS[panel.get("kind", "lines")]()
    made.title(panel["title"]).description(panel["about"]).unit(panel["unit"])
    made.datasource(_PROMETHEUS).height(_HEIGHT).span(panel.get("width", 6))
    for index, (legend, query) in enumerate(panel["queries"].items()):
        made.with_target(
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + index))
            .expr(_query(query, board))
            .legend_format(legend)
            .range()
        )
    if panel.get("stacked"):
        made.fill_opacity(30).stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
    if "log" in panel:
        link = build.DashboardLink("Logs").target_blank(True).url(_logs_url(panel["log"]))
        made.data_links([link])
    return made


def _lines() -> timeseries.Panel:
    return timeseries.Panel().line_width(1).fill_opacity(5).show_points(options.VisibilityMode.AUTO)


def _stat() -> stat.Panel:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _states() -> statetimeline.Panel:
    yes = model.ValueMappingResult(text="yes", color="green", index=0)
    no = model.ValueMappingResult(text="no", color="red", index=1)
    return statetimeline.Panel().mappings([model.ValueMap({"1": yes, "0": no})])


_KINDS = {"lines": _lines, "stat": _stat, "states": _states}


def _query(query: str, board: Mapping[str, Any]) -> str:
    return query.replace("*}", board["selector"] + "}")


def _logs_url(fields: Mapping[str, str]) -> str:
    """Returns the address, in Grafana, of the log lines in Loki with these values of fields."""
    search = " | ".join(["{server=~`.+`}", "json", *(f"{k}=`{v}`" for k, v in fields.items())])
    panes = {
        "logs": {
            "datasource": "${logs}",
            "queries": [{"refId": "A", "expr": search}],
            "range": {"from": "${__from}", "to": "${__to}"},
        }
    }
    # Grafana puts the values of variables in before it decodes the address.
    return f"/explore?schemaVersion=1&panes={quote(json.dumps(panes), safe='${}')}"


def main() -> None:
    """Writes the dashboards."""
    for file, text in dashboards():
        file.write_text(text)


if __name__ == "__main__":
    main()
