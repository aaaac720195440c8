"""Responses streamed over gRPC beside the engine called directly."""

from __future__ import annotations

from contextlib import ExitStack

from rollout.bench import Bench, build_directory
from rollout.driven import DrivenProgram
from rollout.servers import OFF, RolloutSide
from rollout.turns import Phase, counted

_STREAMED, _DIRECT = "streamed over gRPC", "engine called directly"
_BAR = 0.97


def run(bench: Bench) -> None:
    """Measures the section."""
    count = max(bench.options.counts)
    figure = f"gRPC streaming by the engine called directly, {counted(count)}"
    program = build_directory() / "bin" / "tandem-engine-bench"
    if not program.exists():
        bench.table.missing(figure, f"{program} is not built")
        return
    settings = {"senior_model": str(bench.options.model)}
    bounds = {"max_num_seqs": count, "max_model_len": bench.longest}
    words = [f"{name}={value}" for name, value in {**settings, **bounds}.items()]
    with ExitStack() as stack:
        server = stack.enter_context(bench.server(settings))
        direct = stack.enter_context(DrivenProgram([program, *words]))
        sides = {_DIRECT: direct, _STREAMED: RolloutSide(server, OFF, stream_all=True)}
        turns = bench.take_turns(sides, bench.options.job(count))
        ratio = turns.ratio(_STREAMED, _DIRECT, Phase.WHOLE)
        bench.table.at_least(figure, ratio, _BAR)
