"""Waiting for servers that other programs start, such as the pods of a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from tandem.errors import ServerStartError
from tandem.rpc.credentials import Credentials
from tandem.rpc.transport import Connection

_log = logging.getLogger(__name__)


_PAUSE_SECONDS = 0.5


def wait_until_serving(
    addresses: Iterable[str],
    credentials: Credentials,
    timeout_seconds: float,
) -> None:
    """Returns once each server answers SERVING; says for which one it waits.

    Raises ServerStartError if one does not within `timeout_seconds`, all of them together, and at
    once if TLS refuses the connection.
    """
    deadline = time.monotonic() + timeout_seconds
    for address in addresses:
        with Connection(address, credentials=credentials) as connection:
            noted = False
            while (health := connection.check_health()).status != "SERVING":
                state = health.reason or health.status
                if health.refused:
                    raise ServerStartError(f"the server at {address}: {health.reason}")
                if time.monotonic() > deadline:
                    raise ServerStartError(
                        f"the server at {address} is not serving after {timeout_seconds:g} s: "
                        f"{state}",
                        hint="servers.start_timeout_seconds sets the longest wait",
                    )
                if not noted:
                    _log.info(f"waiting for the server at {address}: {state}")
                    noted = True
                time.sleep(_PAUSE_SECONDS)
