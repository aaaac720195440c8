"""`tandem up`, `tandem status`, `tandem health`: starting servers and asking for their state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.command_line import EXIT_UNREACHABLE, JsonFlag, command
from tandem.cli.commands.options import Overrides
from tandem.errors import ConfigError, NotImplementedByServerError, RpcError
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.terminal.output import Output
from tandem.utils.interrupt import Interrupt

if TYPE_CHECKING:
    from tandem._proto.types.v1 import server_pb2
    from tandem.rpc.transport import Health


@command()
def up(
    cluster_file: Annotated[
        Path, typer.Argument(help="Cluster configuration (YAML).", metavar="CLUSTER.yaml")
    ],
    overrides: Overrides = None,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Start a local cluster, print its addresses, and keep it running until Ctrl-C (exit code 0).

    While it runs, this user's other commands find its servers without being given
    their addresses.
    """
    from tandem.cluster.local import LocalCluster
    from tandem.cluster.plan import planned
    from tandem.cluster.registry import announced
    from tandem.preflight.planned_cluster import check_cluster
    from tandem.preflight.problems import Problems

    output = Output(as_json=as_json)
    settings = loading.load(ClusterSettings, cluster_file, overrides or [])
    problems = Problems()
    with output.shows_log():
        settings = check_cluster(planned(settings), None, None, problems).cluster
    problems.raise_any()
    with (
        output.shows_log(),
        Interrupt(lambda: output.note("stopping the servers")) as interrupt,
        LocalCluster(settings, credentials=credentials) as cluster,
        announced(cluster),
    ):
        interrupt.defer()
        servers = [server.describe() for server in cluster.servers]
        # Clients call rank 0 alone.
        output.result(
            {"servers": servers}, output.rows([one for one in servers if not one["rank"]])
        )
        output.note("Ctrl-C stops the cluster")
        while not interrupt.requested:
            cluster.check()
            time.sleep(0.2)


@command()
def status(
    rollout: Annotated[str | None, typer.Option(help="Address of the rollout server.")] = None,
    trainer: Annotated[str | None, typer.Option(help="Address of the trainer.")] = None,
    critic: Annotated[str | None, typer.Option(help="Address of the critic.")] = None,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Show every server's model and version, or its problem. Exit code 3 if none answers.

    Without addresses, asks the servers in the cluster that `tandem up` runs, else
    those at the default addresses.
    """
    from tandem.cluster import registry
    from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
    from tandem.rpc.retry import ONCE

    output = Output(as_json=as_json)
    kinds = {kind.role: kind for kind in (RolloutClient, TrainerClient, CriticClient)}
    named = {"rollout": rollout, "trainer": trainer, "critic": critic}
    known = [] if any(named.values()) else registry.servers()
    own = registry.with_defaults(credentials, found=bool(known))
    rows = [
        _status_row(kinds[role](address, timeout_seconds=5, retry=ONCE, credentials=own))
        for role, address in [(one["role"], one["address"]) for one in known] or named.items()
    ]
    _name_unused_speculators(rows)
    output.result({"servers": rows}, output.rows(rows, counts=("parameters",)))
    if not any(row["health"] == "SERVING" for row in rows):
        raise typer.Exit(EXIT_UNREACHABLE)


@command()
def health(
    address: Annotated[
        list[str] | None,
        typer.Argument(
            help="Addresses (host:port). Default: the servers in the cluster that `tandem up` runs."
        ),
    ] = None,
    service: Annotated[str, typer.Option(help="Service name; empty: the server.")] = "",
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Show the gRPC health of servers. Exit code 3 unless all of them are SERVING."""
    from tandem.cluster import registry
    from tandem.rpc.transport import Connection

    output = Output(as_json=as_json)
    addresses = address or [server["address"] for server in registry.servers()]
    if not addresses:
        raise ConfigError("no address is given, and no cluster of `tandem up` is running")
    own = registry.with_defaults(credentials, found=not address)
    rows = []
    for one in addresses:
        with Connection(one, credentials=own) as connection:
            rows.append({"address": one} | _health_cells(connection.check_health(service)))
    output.result({"servers": rows}, output.rows(rows))
    if any(row["health"] != "SERVING" for row in rows):
        raise typer.Exit(EXIT_UNREACHABLE)


def _health_cells(health: Health) -> dict[str, Any]:
    return {"health": health.status} | ({"problem": health.reason} if health.reason else {})


def _storage(model: server_pb2.ModelInfo) -> str:
    """Returns how the linear maps of a model are stored: "bfloat16", "int4"; "" if not told."""
    from tandem.rpc.wire import enum_name

    quantization = enum_name(model, "quantization")
    return enum_name(model, "dtype") if quantization in ("", "none") else quantization


def _status_row(client: Any) -> dict[str, Any]:
    """Returns the row of one server in `tandem status`; closes the client."""
    row: dict[str, Any] = {"role": client.role, "address": client.address}
    with client:
        row |= _health_cells(client.check_health())
        if row["health"] == "UNREACHABLE":
            return row
        try:
            info = client.info()
        except NotImplementedByServerError:
            return row | {"problem": f"not a {client.role} server"}
        except RpcError as error:
            return row | {"problem": error.message}
    server = info.server
    has_junior = client.role == "rollout" and info.HasField("junior")
    speculator: dict[str, Any] = {}
    if client.role == "trainer" and info.has_speculator:
        speculator["speculator"] = "trains"
    if client.role == "rollout" and info.HasField("speculator_weights"):
        speculator["speculator_version"] = info.speculator_weights.version
    return row | {
        "version": server.weights.version,
        "model": server.model.path,
        "storage": _storage(server.model),
        **({"junior_storage": _storage(info.junior)} if has_junior else {}),
        "parameters": server.model.num_parameters,
        "digest": server.weights.digest,
        **speculator,
        "uptime_seconds": round(server.uptime_seconds, 1),
        "software": server.software_version,
    }


def _name_unused_speculators(rows: list[dict[str, Any]]) -> None:
    """Names the rollout servers that do not draft with the speculator of the trainer."""
    if not any("speculator" in row for row in rows):
        return
    for row in rows:
        if row["role"] == "rollout" and "version" in row and "speculator_version" not in row:
            row["problem"] = "has no senior.speculator: the trainer's speculator is not used"
