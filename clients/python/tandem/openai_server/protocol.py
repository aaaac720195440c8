"""The connections of the web server: each must bring a request soon."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tandem.openai_server import limits


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with a time in which the headers of the first request must arrive."""

    def connection_made(self, transport: Any) -> None:
        """Closes the connection later, unless a request has begun by then."""
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(limits.HEADER_SECONDS, self._require_request)

    def _require_request(self) -> None:
        if self.cycle is None:
            self.transport.close()
