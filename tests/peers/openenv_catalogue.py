"""Servers of OpenEnv's catalogue, of a checkout of its repository, in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fakes

# The checkout; "" without one.
CHECKOUT = os.environ.get("OPENENV_CHECKOUT", "")
# Most seconds until a server answers.
START_SECONDS = 120


@contextmanager
def served(name: str, folder: Path) -> Iterator[str]:
    """Serves an environment of the catalogue in a process of its own; yields its URL."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    paths = [f"{CHECKOUT}/envs", *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "uvicorn", f"{name}.server.app:app", "--port", str(port)]
    log = (folder / f"{name}.log").open("w+")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
    with log, subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log) as ran:
        try:
            fakes.wait_until(lambda: ran.poll() is not None or answers(port), seconds=START_SECONDS)
            assert ran.poll() is None, Path(log.name).read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            ran.kill()


def answers(port: int) -> bool:
    """Whether a server answers."""
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).status == 200
    except OSError:
        return False
