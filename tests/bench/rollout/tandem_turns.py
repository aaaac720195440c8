"""Two models that write in turn beside the senior alone, by strategy and by kind of junior."""

from __future__ import annotations

from contextlib import ExitStack

from rollout.bench import Bench
from rollout.costs import Costs, least_seconds
from rollout.models import write_first_layers
from rollout.servers import OFF, WORD, RolloutSide
from rollout.turns import Phase, Ratio, Side, Turns, counted

# Juniors as large as the senior: settings that a build may refuse, and the bars of the time per
# token, for one sequence and for several (None: no bar), as a ratio to the senior alone.
_JUNIORS: dict[str, tuple[dict[str, str], float, float | None]] = {
    "float32": ({}, 1.1, None),
    "bfloat16": ({"junior_dtype": "bfloat16"}, 1.1, 1.7),
    "int8": ({"junior_quantization": "int8"}, 1.1, 1.5),
}
_ABOVE_BOUND = 1.1
_STRATEGIES = {
    "bernoulli": {"selection_strategy": "bernoulli", "prob_senior": 0.5},
    "chunk of 8": {"selection_strategy": "chunk", "chunk_size": 8},
    "alternating": {"selection_strategy": "alternating"},
    "sentence": {"selection_strategy": "sentence"},
}
_THIRD = 1 / 3
_SOLO = "the senior alone"
_SMALL = "word, junior of a third"


def run(bench: Bench) -> None:
    """Measures the section."""
    model = bench.options.model
    small = write_first_layers(bench.folder / "third", model, _THIRD)
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for form, (asked, _, _) in _JUNIORS.items():
            name = f"word, junior {form}"
            settings = {"senior_model": str(model), "junior_model": str(model)}
            figures = [_figure(name, count) for count in bench.options.counts]
            server = bench.start(stack, name, bench.server(settings, asked), figures)
            if server is None:
                continue
            if _SOLO not in sides:
                sides[_SOLO] = RolloutSide(server, OFF)
                for strategy, fields in _STRATEGIES.items():
                    if not bench.options.skips(strategy):
                        sides[strategy] = RolloutSide(server, {"enabled": True, **fields})
            sides[name] = RolloutSide(server, WORD)
        settings = {"senior_model": str(model), "junior_model": str(small)}
        server = bench.start(stack, _SMALL, bench.server(settings))
        if server is not None:
            sides[_SMALL] = RolloutSide(server, WORD)
        for count in bench.options.counts:
            turns = bench.take_turns(sides, bench.options.job(count))
            for form, (_, one, several) in _JUNIORS.items():
                _against_solo(bench, turns, form, one if count == 1 else several)
            for strategy in _STRATEGIES:
                _note(bench, turns, strategy)
            _note(bench, turns, _SMALL)


def _figure(name: str, count: int) -> str:
    return f"time per token by the senior's alone, {counted(count)}: {name}"


def _time_ratio(turns: Turns, name: str) -> Ratio:
    return turns.ratio(name, _SOLO, Phase.WHOLE).inverse


def _note(bench: Bench, turns: Turns, name: str) -> None:
    if name in turns:
        bench.table.note(_figure(name, turns.job.sequences), _time_ratio(turns, name))


def _against_solo(bench: Bench, turns: Turns, form: str, bar: float | None) -> None:
    name = f"word, junior {form}"
    if name not in turns:
        return
    figure = _figure(name, turns.job.sequences)
    ratio = _time_ratio(turns, name)
    if bar is None:
        bench.table.note(figure, ratio)
    else:
        bench.table.at_most(figure, ratio, bar)
    senior = Costs.of(bench.options.model, "float32")
    junior = Costs.of(bench.options.model, form)
    read, flops = bench.limits.read_bytes, bench.limits.product_flops("float32")
    job, authors = turns.job, turns.of(name)[-1].authors
    alone = [bytes(job.new_tokens)] * job.sequences
    bound = least_seconds(job, [junior, senior], authors, read, flops)
    bound /= least_seconds(job, [senior], alone, read, flops)
    detail = f"lower bound {bound:.2f}"
    bench.table.at_most(f"{figure}, by its lower bound", ratio.value / bound, _ABOVE_BOUND, detail)
