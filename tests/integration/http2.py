"""HTTP/2 frames made by hand (RFC 9113), for a client that breaks rules which gRPC keeps."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
CONTINUATION = 9
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
_INITIAL_WINDOW_SIZE = 4  # an identifier in a SETTINGS frame
_MAX_DATA = 16384  # bytes of a DATA frame


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def request(path: str) -> bytes:
    """The header block of a gRPC call, with literal header fields."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def message(announced: int, sent: int) -> bytes:
    """A gRPC message that announces `announced` bytes and holds `sent`."""
    return b"\0" + announced.to_bytes(4) + bytes(sent)


class Connection:
    """A connection that keeps to flow control; a send returns False once the server closed it.

    It comes from the loopback address `source`, for servers tell clients apart by their address.
    """

    def __init__(self, address: str, source: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection(
            (host, int(port)), timeout=20, source_address=(source, 0)
        )
        self._windows = {0: 65535}
        self._initial = 65535
        self._changed = threading.Condition()
        self._next_stream = 1
        self.closed = False
        self.goaway = ""
        """Why the server closed the connection."""
        self._send(PREFACE + frame(SETTINGS, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends the connection, which would otherwise last as long as the reader waits for it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def open(self, path: str) -> int:
        """Starts a call; returns the number of its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        with self._changed:
            self._windows[stream] = self._initial
        self._send(frame(HEADERS, END_HEADERS, stream, request(path)))
        return stream

    def open_many(self, path: str, count: int) -> bool:
        """Starts `count` calls, with one write; nothing can be sent on them."""
        headers = request(path)
        frames = b""
        for _ in range(count):
            frames += frame(HEADERS, END_HEADERS, self._next_stream, headers)
            self._next_stream += 2
        return self._send(frames)

    def open_and_reset(self, path: str, count: int) -> bool:
        """Starts `count` calls and resets each at once."""
        headers = request(path)
        frames = b""
        for _ in range(count):
            frames += frame(HEADERS, END_HEADERS, self._next_stream, headers)
            frames += frame(RST_STREAM, 0, self._next_stream, (8).to_bytes(4))  # CANCEL
            self._next_stream += 2
        return self._send(frames)

    def send(self, stream: int, payload: bytes, *, end: bool = False) -> bool:
        """Sends `payload` on a stream, as fast as the flow-control windows allow."""
        deadline = time.monotonic() + 20
        while payload:
            with self._changed:
                while (size := min(self._windows[0], self._windows[stream], _MAX_DATA)) <= 0:
                    if self.closed or not self._changed.wait(deadline - time.monotonic()):
                        return False
                data, payload = payload[:size], payload[size:]
                for window in (0, stream):
                    self._windows[window] -= len(data)
            flags = END_STREAM if end and not payload else 0
            if not self._send(frame(DATA, flags, stream, data)):
                return False
        return True

    def send_frames(self, frames: bytes) -> bool:
        """Sends frames as they are."""
        return self._send(frames)

    def wait_closed(self) -> None:
        """Returns when the server has closed the connection."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.closed, 20)

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            received = self._socket.recv(size - len(data))
            if not received:
                raise ConnectionError
            data += received
        return data

    def _read(self) -> None:
        try:
            while True:
                head = self._receive(9)
                payload = self._receive(int.from_bytes(head[:3]))
                self._on_frame(head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF, payload)
        except OSError:
            pass
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._send(frame(kind, ACK, 0, payload if kind == PING else b""))
        with self._changed:
            if kind == WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(payload)
            elif kind == SETTINGS:
                for key, value in struct.iter_unpack(">HI", payload):
                    if key == _INITIAL_WINDOW_SIZE:
                        for open_stream in self._windows.keys() - {0}:
                            self._windows[open_stream] += value - self._initial
                        self._initial = value
            elif kind == GOAWAY:
                self.goaway = payload[8:].decode()
            self._changed.notify_all()
