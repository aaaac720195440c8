"""The files that `tandem certs` writes, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.rpc.credentials import Credentials

ROLES = ("reader", "user", "admin")


@dataclass(frozen=True)
class CertificateDirectory:
    """A directory that `tandem certs` wrote: its files, and the settings that name them."""

    path: Path

    def file(self, name: str) -> str:
        """Returns the path of a file: ca.crt, server.key or admin.token, for example."""
        return str(self.path / name)

    def server(self) -> dict[str, Any]:
        """Returns the settings `tls` and `tokens` of a server's section `server`."""
        return {
            "tls": {
                "certificate_file": self.file("server.crt"),
                "private_key_file": self.file("server.key"),
                "ca_file": self.file("ca.crt"),
            },
            "tokens": {f"{role}_file": self.file(f"{role}.token") for role in ROLES},
        }

    def client(self, role: str = "admin") -> Credentials:
        """Returns the credentials of a client with the token of a role."""
        return Credentials(
            self.file("ca.crt"),
            self.file("client.crt"),
            self.file("client.key"),
            self.file(f"{role}.token"),
        )
