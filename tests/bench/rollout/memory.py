"""The rollout server's memory beside its weights and caches, and that of a long queue."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from pathlib import Path

from tandem.cluster.local import find_binary

from rollout.bench import Bench
from rollout.servers import OFF, WORD, RolloutServer, RolloutSide, prompts_of
from rollout.turns import Job

_BAR = 1.1
_BACKLOG = 4096
# The most that a waiting sequence may take, as a fraction of the room of a running one in both
# caches.
_BAR_WAITING = 0.01
_PLAN_LINE = re.compile(r"#\s+([\d.]+) GB  (\w+)")
_WAIT_SECONDS = 60.0


def run(bench: Bench) -> None:
    """Measures the section."""
    model = str(bench.options.model)
    count = max(bench.options.counts)
    settings = {"senior_model": model, "junior_model": model}
    with bench.server(settings) as server:
        RolloutSide(server, WORD).run(bench.options.job(count))
        plan = _plan({**settings, "max_num_seqs": count, "max_model_len": bench.longest})
        caches = sum(size for name, size in plan.items() if name.endswith("_kv_cache"))
        planned = caches + sum(size for name, size in plan.items() if name.endswith("_weights"))
        held = _anonymous_bytes(server)
        detail = f"{held / 1e6:.0f} of {planned / 1e6:.0f} MB"
        figure = "memory of the server by its weights and caches"
        bench.table.at_most(figure, held / planned, _BAR, detail)
        each = _backlog_bytes(bench, server) / _BACKLOG
        room = caches / count
        detail = f"{each:.0f} of {room:.0f} bytes"
        figure = f"memory of a waiting sequence ({_BACKLOG} wait) by that of a running one"
        bench.table.at_most(figure, each / room, _BAR_WAITING, detail)


def _plan(settings: dict[str, object]) -> dict[str, float]:
    """Returns the bytes of each item of the server's memory plan."""
    words = [f"{name}={value}" for name, value in settings.items()]
    program = find_binary("tandem-rollout-server")
    printed = subprocess.run(
        [program, *words, "--check-config"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return {name: float(size) * 1e9 for size, name in _PLAN_LINE.findall(printed)}


def _anonymous_bytes(server: RolloutServer) -> int:
    status = Path(f"/proc/{server.process.process.pid}/status").read_text()
    [kilobytes] = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) << 10


def _backlog_bytes(bench: Bench, server: RolloutServer) -> int:
    """Returns the memory that the server takes when a queue is added to it."""
    server.client.pause()
    before = _anonymous_bytes(server)
    with server.client.open_stream() as stream:
        job = Job(_BACKLOG, bench.options.prompt_tokens, bench.options.new_tokens)
        prompts = [one.named(index) for index, one in enumerate(prompts_of(job, OFF, streamed=0))]
        stream.submit(prompts)
        deadline = time.monotonic() + _WAIT_SECONDS
        while _waiting(server) < _BACKLOG:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{_waiting(server)} of {_BACKLOG} sequences wait")
            time.sleep(0.1)
        taken = _anonymous_bytes(server) - before
    server.client.resume()
    return taken


def _waiting(server: RolloutServer) -> float:
    with urllib.request.urlopen(f"http://{server.process.metrics_address}/metrics") as reply:
        text = reply.read().decode()
    [value] = re.findall(r"^tandem_sequences_waiting (\S+)$", text, re.MULTILINE)
    return float(value)
