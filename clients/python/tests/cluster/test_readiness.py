"""A run waits at its start for servers that other programs start."""

from __future__ import annotations

import socket
import threading

import pytest
from fakes import FakeWorld, serve

from tandem.cluster.readiness import wait_until_serving
from tandem.errors import ServerStartError
from tandem.rpc.credentials import Credentials


def test_servers_that_serve_are_not_waited_for(notes):
    with serve(FakeWorld()) as address:
        wait_until_serving([address, address], Credentials(), 60)
    assert notes == []


def test_a_server_that_comes_later_is_waited_for(notes):
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{place.getsockname()[1]}"
    noted = threading.Event()

    notes.on_note = lambda _: noted.set()

    done = threading.Event()

    def late() -> None:
        noted.wait(60)
        with serve(FakeWorld(), address=address):
            done.wait(60)

    server = threading.Thread(target=late)
    server.start()
    try:
        wait_until_serving([address], Credentials(), 60)
    finally:
        noted.set()
        done.set()
        server.join()
    [text] = notes
    assert text.startswith(f"waiting for the server at {address}: ")


def test_the_wait_has_an_end():
    with pytest.raises(ServerStartError) as caught:
        wait_until_serving(["127.0.0.1:1"], Credentials(), 1)
    assert "127.0.0.1:1 is not serving after 1 s" in str(caught.value)
    assert "servers.start_timeout_seconds" in caught.value.hint
