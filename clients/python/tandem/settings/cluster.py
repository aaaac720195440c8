"""The schema of cluster files, and of the servers' addresses and credentials in a run file.

A server's own section has a schema of its own (proto/tandem/config/v1), and is carried unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from tandem.errors import ConfigError
from tandem.rpc.certificate_directory import CertificateDirectory
from tandem.rpc.credentials import Credentials
from tandem.settings.base import NonEmptyPath, Settings, Text, several
from tandem.settings.explain import validated
from tandem.settings.paths import anchor_server, name_model
from tandem.settings.values import read_mapping


class CredentialsSettings(Settings):
    """Fields of Credentials: certificates (PEM) and tokens for the calls to servers.

    A field that is not set takes the value of TANDEM_CA_FILE, TANDEM_CERTIFICATE_FILE,
    TANDEM_PRIVATE_KEY_FILE or TANDEM_TOKEN_FILE.
    """

    # Authorities that sign the servers' certificates; turns TLS on.
    ca_file: NonEmptyPath | None = None
    # The client's certificate and its key, for servers that demand them.
    certificate_file: NonEmptyPath | None = None
    private_key_file: NonEmptyPath | None = None
    # Tokens, one per line; the first one is sent.
    token_file: NonEmptyPath | None = None

    def credentials(self) -> Credentials:
        """Returns the fields as Credentials."""
        return Credentials(**self.model_dump())


class ServersSettings(Settings):
    """Addresses of running servers, for a run without `cluster`, and how long to wait for them.

    If no address is set, the run uses the servers that `tandem up` runs, else the default ports.
    """

    rollout: Annotated[list[Text] | None, BeforeValidator(several)] = Field(None, min_length=1)
    trainer: Text | None = None
    # Not set: the trainer's critic_address.
    critic: Text | None = None
    # Longest time of a call in seconds: a call draws all samples of a step at one server, makes a
    # train step or saves a checkpoint. It holds with `cluster`, too.
    timeout_seconds: float = Field(3600.0, gt=0, le=1e8)
    # Most seconds that a run waits for a server that fails in its middle: one that restarts, has no
    # address for a moment or refuses work because it is full. Progress starts the time again. It
    # holds with `cluster`, too. 0: the first failure ends the run.
    retry_seconds: float = Field(120.0, ge=0, le=1e8)
    # Most seconds that the run waits at its start for servers without `cluster` to serve. 0: it
    # fails at once if one does not.
    start_timeout_seconds: float = Field(0.0, ge=0, le=1e8)

    @property
    def any_named(self) -> bool:
        """Whether an address is set."""
        return bool(self.rollout or self.trainer or self.critic)


class LoraSettings(Settings):
    """Low-rank adapters (LoRA), as `lora` of the servers' own sections has them."""

    # Rank of the adapters. Not set: that of path.
    rank: int | None = Field(None, ge=1)
    # Numerator of their scale. Not set: 32, or that of path.
    alpha: float | None = Field(None, gt=0)
    # Linear maps with adapters, by the last part of their names, or all-linear. Empty: all-linear,
    # or those of path.
    target_modules: Annotated[list[Text], BeforeValidator(several)] = Field([])
    # Seed of new adapters. Not set: 0.
    seed: int | None = Field(None, ge=0)
    # Directory of an adapter in PEFT's format, with which the adapters begin.
    path: NonEmptyPath | None = None


class ClusterSettings(Settings):
    """Servers of one machine (`tandem up`). Each section is the server's own configuration.

    `ranks` in a section is the number of the server's processes (default 1); it is not a setting of
    the server. Free ports are picked unless a section names them.
    """

    # Hugging Face directory, or model of the Hub, for every model that a section does not name: the
    # senior, its frozen start as junior, the critic's start. In a run whose KL needs them, the
    # trainer's reference_model is its own model, and its junior_model the rollout servers' junior.
    model: NonEmptyPath | None = None
    # Adapters of the senior, for the trainer and every rollout server whose section has no `lora`.
    # The critic has adapters where its own section says so.
    lora: LoraSettings | None = None
    # Directory of `tandem certs`: clients of the cluster take certificates and token from it, and
    # servers do whose sections have no `server.tls` or no `server.tokens`.
    certs: NonEmptyPath | None = None
    # Folder of logs and resolved configurations: each start writes its own logs/attempt_N.
    directory: NonEmptyPath = Field(default_factory=lambda: Path.cwd() / "runs" / "cluster")
    rollout: list[dict[str, Any]] = Field([])
    trainer: dict[str, Any] | None = None
    critic: dict[str, Any] | None = None
    # Most seconds that all servers together may take to load.
    start_timeout_seconds: float = Field(300.0, gt=0)
    # Seconds between SIGTERM and SIGKILL.
    stop_timeout_seconds: float = Field(40.0, gt=0)

    def credentials(self) -> Credentials:
        """Returns the credentials of a client of the cluster; none without `certs`."""
        return Credentials() if self.certs is None else CertificateDirectory(self.certs).client()

    @classmethod
    def anchor(cls, values: dict[str, Any], base: Path) -> None:
        """Also anchors the paths that the servers' sections name."""
        name_model(values, "model", base)
        super().anchor(values, base)
        rollouts = values.get("rollout")
        all_rollouts = rollouts if isinstance(rollouts, list) else [rollouts]
        for section in (*all_rollouts, values.get("trainer"), values.get("critic")):
            if isinstance(section, dict):
                anchor_server(section, base)

    @model_validator(mode="before")
    @classmethod
    def _single_rollout(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("rollout"), dict):
            values = values | {"rollout": [values["rollout"]]}
        return values

    @model_validator(mode="after")
    def _some_server(self) -> ClusterSettings:
        if not self.rollout and self.trainer is None and self.critic is None:
            raise ValueError("no server: give rollout, trainer or critic")
        return self

    @classmethod
    def require_kind(cls, path: Path, values: dict[str, Any]) -> None:
        """Raises ConfigError for a run file."""
        if {"run_dir", "data"} & values.keys():
            raise ConfigError(
                f"{path} is a run file, not a cluster file",
                hint="`tandem train` runs it, with the servers of its `cluster`",
            )


def read_cluster(path: Path) -> dict[str, Any]:
    """Returns the raw values of a cluster file, once they have been checked."""
    values = read_mapping(path)
    ClusterSettings.require_kind(path, values)
    ClusterSettings.anchor(values, path.parent)
    validated(ClusterSettings, values, f"cluster: {path}")
    return values
