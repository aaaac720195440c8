"""Publications of weights on one machine: their rate, and how long they hold up generation.

The receiver reads the weights in the trainer's file (ADR 118); the metric
tandem_weight_bytes_received_total says so.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample

from rollout.bench import Bench, build_directory
from rollout.driven import DrivenProgram
from rollout.servers import OFF, RolloutServer, prompts_of
from rollout.turns import Job, Moment

_BAR_RATE, _BAR_GAP = 0.7, 2.0
# Tokens of the response that is written meanwhile; it is cancelled at the end.
_LONG = 1500
_TOKENS_BEFORE = 8
# Settings of the senior; the gaps are those of the first.
_LANES = {"bfloat16": {"dtype": "bfloat16"}, "float32": {}}
# Settings of trainer and senior for an update of adapters alone.
_LORA = {"lora": {"rank": 16}}


def run(bench: Bench) -> None:
    """Measures the section: rates for servers of both types, gaps for one of bfloat16."""
    bench.limits.measure()
    lanes = {
        name: lane
        for name, lane in _LANES.items()
        if name == "float32" or not bench.options.skips(f"weights {name}")
    }
    with ExitStack() as stack:
        program = build_directory() / "bin" / "tandem-stream-bench"
        plain = stack.enter_context(DrivenProgram([program]))
        _rates(
            bench,
            {name: _Receiver(bench, lane, "keep", stack) for name, lane in lanes.items()},
            plain,
        )
    lane = next(iter(lanes.values()))
    with ExitStack() as stack:
        sides = {
            "keep": _Gaps(_Receiver(bench, lane, "keep", stack)),
            "adapters, keep": _Gaps(_Receiver(bench, lane, "keep", stack, adapters=_LORA)),
        }
        for name, value, detail in _gaps(bench, sides):
            bench.table.at_most(name, value, _BAR_GAP, detail)
    with ExitStack() as stack:
        sides = {"recompute": _Gaps(_Receiver(bench, lane, "recompute", stack))}
        for name, value, detail in _gaps(bench, sides):
            bench.table.note(name, value, detail)


class _Receiver:
    """A rollout server whose senior is stored so, and a trainer that publishes to it."""

    def __init__(
        self,
        bench: Bench,
        lane: dict[str, str],
        policy: str,
        stack: ExitStack,
        adapters: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        model = str(bench.options.model)
        settings = {"on_weight_update": policy, "senior": {"model": model, **lane, **adapters}}
        self.server = stack.enter_context(
            bench.server(
                settings,
                longest=bench.options.prompt_tokens + _LONG,
                trainer={"model": model, "optimizer": {"learning_rate": 1e-6}, **adapters},
            )
        )
        self.publisher = stack.enter_context(_Publisher(self.server))


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
        """Publishes the weights; returns the bytes that were sent."""
        [result] = self._client.publish_weights(self._targets).results
        if result.status.code:
            raise RuntimeError(f"{result.target}: {result.status.message}")
        return result.bytes


@dataclass
class _Rates:
    """The time of publications to one receiver, and of a plain stream of as many bytes."""

    size: int = 0
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    receiver_cpu: list[float] = field(default_factory=list)
    trainer_cpu: list[float] = field(default_factory=list)

    def measure(self, side: _Receiver, plain: DrivenProgram) -> None:
        """Publishes once."""
        receiver = side.server.process.process.pid
        sender = side.server.cluster.trainer.process.pid
        side.publisher.prepare()
        begin, of_sender = Moment.now([receiver]), Moment.now([sender])
        self.size = side.publisher.publish()
        published, sent = Moment.now([receiver]), Moment.now([sender])
        plain.ask(str(self.size))
        arrived = Moment.now()
        self.seconds.append((published - begin).seconds)
        self.plain_seconds.append((arrived - published).seconds)
        self.receiver_cpu.append((published - begin).cpu_seconds)
        self.trainer_cpu.append((sent - of_sender).cpu_seconds)

    def detail(self) -> str:
        """Describes the figures."""
        ours, plain = (
            _gigabytes([self.size / second for second in seconds])
            for seconds in (self.seconds, self.plain_seconds)
        )
        receiver = statistics.median(self.receiver_cpu)
        trainer = statistics.median(self.trainer_cpu)
        return (
            f"{ours}, plain {plain}; {self.size / 1e6:.0f} MB in {_seconds(self.seconds)}; "
            f"CPU seconds: receiver {receiver:.2f}, trainer {trainer:.2f}"
        )


def _rates(bench: Bench, sides: dict[str, _Receiver], plain: DrivenProgram) -> None:
    """Publishes to the receivers by turns."""
    rates = {name: _Rates() for name in sides}
    for side in sides.values():
        _Rates().measure(side, plain)  # the first one makes files and connections
    for _ in range(bench.options.rounds):
        for name, side in sides.items():
            rates[name].measure(side, plain)
    for name, rate in rates.items():
        pairs = zip(rate.plain_seconds, rate.seconds, strict=True)
        figure = f"weight update ({name}), bytes/s by a plain stream of 1 MiB messages"
        ratio = statistics.median(plain / ours for plain, ours in pairs)
        bench.table.at_least(figure, ratio, _BAR_RATE, rate.detail())
    if len(rates) == len(_LANES):
        half, whole = (statistics.median(rates[name].seconds) for name in _LANES)
        bench.table.note("weight update, seconds of bfloat16 by those of float32", half / whole)


def _seconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def _gigabytes(rates: list[float]) -> str:
    low, high = min(rates) / 1e9, max(rates) / 1e9
    return f"{statistics.median(rates) / 1e9:.2f} GB/s ({low:.2f} to {high:.2f})"


def _gaps(bench: Bench, sides: dict[str, _Gaps]) -> Iterator[tuple[str, float, str]]:
    """Publishes to the receivers by turns; gives figure, median and details of each."""
    for _ in range(bench.options.rounds + 1):
        for side in sides.values():
            side.measure(bench.options.prompt_tokens)
    for name, side in sides.items():
        figure = f"weight update ({name}), longest decode gap by a pass"
        yield figure, statistics.median(side.ratios[1:]), side.detail()


@dataclass
class _Gaps:
    """The longest time between two tokens during an update, by the usual one."""

    side: _Receiver
    ratios: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)  # seconds of a usual one
    size: int = 0

    def measure(self, prompt_tokens: int) -> None:
        """Publishes once while a response is written."""
        server, publisher = self.side.server, self.side.publisher
        publisher.prepare()
        arrivals: list[float] = []
        enough = threading.Event()
        with server.client.open_stream() as stream:
            [prompt] = prompts_of(Job(1, prompt_tokens, _LONG), OFF, streamed=1)
            stream.submit([prompt.named(0)])
            reader = threading.Thread(target=_read, args=(stream, arrivals, enough))
            reader.start()
            _wait(enough, reader)
            usual = statistics.median(b - a for a, b in itertools.pairwise(arrivals))
            begin = time.perf_counter()
            self.size = publisher.publish()
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
        self.ratios.append(max(gaps) / usual)
        self.passes.append(usual)

    def detail(self) -> str:
        """Describes the figures."""
        counted = self.ratios[1:]
        return (
            f"{min(counted):.2f} to {max(counted):.2f}; "
            f"a pass {1e3 * statistics.median(self.passes[1:]):.1f} ms; {self.size / 1e6:.1f} MB, "
            f"{100 * self._read_share():.0f} % of them read in the sender's file"
        )

    def _read_share(self) -> float:
        moved = self.side.server.received_by_transport()
        return moved.get("file", 0.0) / sum(moved.values())


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
