"""A Prometheus that watches a running cluster with the shipped configuration."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import harness
import shipped
import yaml
from tandem.cluster.local import Server

# Scrapes, and what follows from them, take seconds.
wait_until = functools.partial(harness.wait_until, seconds=180, pause=0.5)

# Seconds between scrapes, and between evaluations of rules.
INTERVAL = 5
# A `for` of the alerts lasts this much less here: a second for a minute.
FACTOR = 60
# Other times of the alerts, as shipped and here.
TIMES = {
    "TandemNoProgress": {"> 600": "> 5"},
    "TandemCheckpointOld": {
        "> 3600": "> 20",
        "[15m] offset 45m": "[15s] offset 12s",
        "[15m])": "[15s])",
    },
    "TandemRolloutStale": {"[10m]": "[15s]"},
}


def shortened(text: str) -> str:
    """The alerts with shorter times: `for` by FACTOR, and TIMES."""
    text = re.sub(r"for: (\d+)m", lambda found: f"for: {int(found[1]) * 60 // FACTOR}s", text)
    for alert, times in TIMES.items():
        head, name, rest = text.partition(f"- alert: {alert}\n")
        rule, separator, others = rest.partition("- alert: ")
        for shipped_time, time_here in times.items():
            assert rule.count(shipped_time) == 1, (alert, shipped_time)
            rule = rule.replace(shipped_time, time_here)
        text = head + name + rule + separator + others
    return text


class Monitor:
    """Prometheus as a process of this machine, on a free port, and a receiver of its alerts.

    Its configuration is a file of deploy/prometheus, but for addresses and the times of alerts. The
    receiver stands for Alertmanager, which Debian has built to read files below /usr/share.

    Attributes:
        received: the alerts that Prometheus has sent, as in Alertmanager's API.
    """

    def __init__(
        self,
        directory: Path,
        servers: Sequence[Server],
        *,
        config: str = "prometheus.yml",
        secrets: Path | None = None,
    ) -> None:
        self.received: list[dict[str, Any]] = []
        self._directory = directory
        self._stack = ExitStack()
        self._receiver = ""
        self._address = ""
        self._servers = servers
        self._config = directory / "prometheus" / config
        self._secrets = secrets

    def __enter__(self) -> Self:
        with self._stack:
            self._receiver = self._stack.enter_context(_receiver(self.received))
            shutil.copytree(shipped.PROMETHEUS, self._directory / "prometheus")
            rules = self._directory / "prometheus/rules/alerts.yml"
            rules.write_text(shortened(rules.read_text()))
            if self._secrets is not None:
                (self._config.parent / "secrets").symlink_to(self._secrets)
            self._write_config(self._servers)
            self._address = _free_address()
            command = [
                shipped.program("prometheus"),
                f"--config.file={self._config}",
                f"--storage.tsdb.path={self._directory}/data",
                f"--web.listen-address={self._address}",
                "--web.enable-lifecycle",
            ]
            log = self._stack.enter_context((self._directory / "prometheus.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            self._stack.callback(process.wait, 30)
            self._stack.callback(process.terminate)
            wait_until(lambda: _answers(f"http://{self._address}/-/ready"))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def watch(self, servers: Sequence[Server]) -> None:
        """Scrapes these servers alone from now on."""
        self._write_config(servers)
        _get(f"http://{self._address}/-/reload", b"")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query. Raises AssertionError, with the text, for an error."""
        form = urllib.parse.urlencode({"query": expression}).encode()
        try:
            reply = _get(f"http://{self._address}/api/v1/query", form)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        return json.loads(reply)["data"]["result"]

    def fired(self) -> set[tuple[str, str]]:
        """The alerts that have fired so far, each with the server that it was about."""
        found = self.query('max_over_time(ALERTS{alertstate="firing"}[1h])')
        return {(one["metric"]["alertname"], one["metric"]["server"]) for one in found}

    def wait_for_alerts(
        self, alerts: Set[tuple[str, str]], *, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Returns when these have fired, each (alert, server); fails with the names of the others.

        `meanwhile` is called before each look.
        """
        missing = alerts

        def all_fired() -> bool:
            nonlocal missing
            meanwhile()
            missing = alerts - self.fired()
            return not missing

        try:
            wait_until(all_fired)
        except AssertionError as error:
            raise AssertionError(f"{sorted(missing)} have not fired: {error}") from None

    def _write_config(self, servers: Sequence[Server]) -> None:
        config = yaml.safe_load((shipped.PROMETHEUS / self._config.name).read_text())
        [job] = config["scrape_configs"]
        targets = [
            {
                "targets": [server.metrics_address],
                "labels": {"cluster": "local", "server": server.role, "rank": str(server.rank)},
            }
            for server in servers
        ]
        if "static_configs" in job:
            shipped_labels = [one["labels"] for one in job["static_configs"]]
            job["static_configs"] = targets
            assert all(one["labels"] | {"rank": "0"} in shipped_labels for one in targets)
        else:
            [file] = job["file_sd_configs"][0]["files"]
            (self._config.parent / file).write_text(yaml.safe_dump(targets))
        [alertmanager] = config["alerting"]["alertmanagers"]
        alertmanager["static_configs"] = [{"targets": [self._receiver]}]
        self._config.write_text(yaml.safe_dump(config))


def has_data(result: list[dict[str, Any]]) -> bool:
    """Whether a query's result has a number."""
    return any(not math.isnan(float(one["value"][1])) for one in result)


@contextmanager
def _receiver(received: list[dict[str, Any]]) -> Iterator[str]:
    """Appends the alerts that it is sent to a list; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def _get(url: str, form: bytes | None = None) -> str:
    with urllib.request.urlopen(url, form, timeout=10) as reply:
        return reply.read().decode()


def _answers(url: str) -> bool:
    try:
        _get(url)
    except OSError:
        return False
    return True
