"""A plain gRPC stream of 1 MiB messages over loopback, the peer of a publication of weights.

Run as a program it is the receiver, which reads messages and keeps nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

_METHOD = "/plain.Stream/Send"
_CHUNK_BYTES = 1 << 20
# Room for the message's frame.
_OPTIONS = [("grpc.max_receive_message_length", 2 * _CHUNK_BYTES)]


class PlainStream:
    """A sender, and a receiver in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._send = self._channel.stream_unary(_METHOD)
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def send(self, size: int) -> None:
        """Sends `size` bytes, and waits until they have arrived."""
        chunk = bytes(_CHUNK_BYTES)
        count = -(-size // _CHUNK_BYTES)
        received = self._send(chunk for _ in range(count))
        if int(received) != count * _CHUNK_BYTES:
            raise RuntimeError(f"{received!r} of {size} bytes arrived")


def _receive(messages: Iterator[bytes], _: Any) -> bytes:
    return str(sum(map(len, messages))).encode()


def main() -> None:
    """Serves until the input ends."""
    server = grpc.server(ThreadPoolExecutor(1), options=_OPTIONS)
    handler = grpc.stream_unary_rpc_method_handler(_receive)
    service = grpc.method_handlers_generic_handler("plain.Stream", {"Send": handler})
    server.add_generic_rpc_handlers((service,))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    main()
