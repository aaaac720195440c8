"""Publications of weights over loopback: their rate, and how long they hold up generation."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample

from rollout.bench import Bench, build_directory
from rollout.driven import DrivenProgram
from rollout.servers import OFF, RolloutServer, prompts_of
from rollout.turns import Job, Moment

_BAR_RATE, _BAR_GAP = 0.7, 1.5
# Tokens of the response that is written meanwhile; it is cancelled at the end.
_LONG = 1500
_TOKENS_BEFORE = 8


def run(bench: Bench) -> None:
    """Measures the section, with a senior that is stored in bfloat16."""
    bench.limits.measure()
    lane = {} if bench.options.skips("weights bfloat16") else {"senior_dtype": "bfloat16"}
    model = str(bench.options.model)
    longest = bench.options.prompt_tokens + _LONG
    trainer = {"model": model, "optimizer": {"learning_rate": 1e-6}}
    for policy in ("keep", "recompute"):
        settings = {"senior_model": model, "on_weight_update": policy, **lane}
        with ExitStack() as stack:
            server = stack.enter_context(bench.server(settings, longest=longest, trainer=trainer))
            publisher = stack.enter_context(_Publisher(server))
            if policy == "keep":
                program = build_directory() / "bin" / "tandem-stream-bench"
                _rate(bench, server, publisher, stack.enter_context(DrivenProgram([program])))
            _gap(bench, server, publisher, policy)


class _Publisher:
    """A trainer whose every publication is of new weights."""

    def __init__(self, server: RolloutServer) -> None:
        self._client = TrainerClient(server.cluster.trainer.address)
        self._targets = [server.process.address]
        self._steps: Iterator[int] = itertools.count(1)

    def __enter__(self) -> _Publisher:
        self._client.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._client.__exit__(*exc)

    def prepare(self) -> None:
        """Makes new weights."""
        step = next(self._steps)
        sample = SupervisedSample([1000, 1001], [1002, 1003])
        self._client.train_step([sample], run_id="bench", step=step, expected_version=step - 1)

    def publish(self) -> int:
        """Publishes the weights; returns their bytes."""
        reply = self._client.publish_weights(self._targets)
        for result in reply.results:
            if result.status.code:
                raise RuntimeError(f"{result.target}: {result.status.message}")
        return reply.bytes


def _rate(bench: Bench, server: RolloutServer, publisher: _Publisher, plain: DrivenProgram) -> None:
    receiver, sender = server.process.process.pid, server.cluster.trainer.process.pid
    ratios, ours, theirs, received, copied = [], [], [], [], []
    for count in range(bench.options.rounds + 1):
        publisher.prepare()
        begin, of_sender = Moment.now([receiver]), Moment.now([sender])
        size = publisher.publish()
        published, sent = Moment.now([receiver]), Moment.now([sender])
        plain.ask(str(size))
        arrived = Moment.now()
        if count > 0:
            ours.append(size / (published - begin).seconds)
            theirs.append(size / (arrived - published).seconds)
            ratios.append(ours[-1] / theirs[-1])
            received.append((published - begin).cpu_seconds)
            copied.append((sent - of_sender).cpu_seconds)
    cpu = f"receiver {statistics.median(received):.2f}, trainer {statistics.median(copied):.2f}"
    rates = f"{_gigabytes(ours)}, plain {_gigabytes(theirs)}"
    detail = f"{rates}; {size / 1e6:.0f} MB; CPU seconds: {cpu}"
    figure = "weight update, bytes/s by a plain stream of 1 MiB messages"
    bench.table.at_least(figure, statistics.median(ratios), _BAR_RATE, detail)


def _gigabytes(rates: list[float]) -> str:
    low, high = min(rates) / 1e9, max(rates) / 1e9
    return f"{statistics.median(rates) / 1e9:.2f} GB/s ({low:.2f} to {high:.2f})"


def _gap(bench: Bench, server: RolloutServer, publisher: _Publisher, policy: str) -> None:
    """Compares the longest time between two tokens during an update with the usual one."""
    ratios = []
    for _ in range(bench.options.rounds):
        publisher.prepare()
        arrivals: list[float] = []
        enough = threading.Event()
        with server.client.open_stream() as stream:
            [prompt] = prompts_of(Job(1, bench.options.prompt_tokens, _LONG), OFF, streamed=1)
            stream.submit([prompt.named(0)])
            reader = threading.Thread(target=_read, args=(stream, arrivals, enough))
            reader.start()
            _wait(enough, reader)
            usual = statistics.median(b - a for a, b in itertools.pairwise(arrivals))
            begin = time.perf_counter()
            publisher.publish()
            end = time.perf_counter()
            # A token behind the update ends the last gap.
            while arrivals[-1] < end:
                if not reader.is_alive():
                    raise RuntimeError("the response ended before the update did")
                time.sleep(usual)
            stream.cancel([prompt.named(0).request_id])
            stream.half_close()
            reader.join()
        gaps = [b - a for a, b in itertools.pairwise(arrivals) if b > begin and a < end]
        ratios.append(max(gaps) / usual)
    figure = f"weight update ({policy}), longest decode gap by a pass"
    value, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
    if policy == "keep":
        bench.table.at_most(figure, value, _BAR_GAP, spread)
    else:
        bench.table.note(figure, value, spread)


def _read(stream: Any, arrivals: list[float], enough: threading.Event) -> None:
    for event in stream:
        if event.WhichOneof("event") == "tokens":
            arrivals.append(time.perf_counter())
            if len(arrivals) > _TOKENS_BEFORE:
                enough.set()


def _wait(enough: threading.Event, reader: threading.Thread) -> None:
    while not enough.wait(1.0):
        if not reader.is_alive():
            raise RuntimeError("the stream ended before the update began")
