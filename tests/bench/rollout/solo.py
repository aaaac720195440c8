"""The senior alone beside llama.cpp and `transformers`, and beside the machine's limits."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import torch

from rollout.bench import Bench
from rollout.costs import Costs
from rollout.servers import OFF, RolloutSide, greedy
from rollout.transformers_side import TransformersSide
from rollout.turns import Phase, Side, Turns, counted

# Our sides: settings that every build has, and those that a build may refuse.
_OURS = {
    "float32": ({}, {}),
    "bfloat16": ({"compute": {"dtype": "bfloat16"}}, {}),
    # Activations rounded, too: products of bf16 by bf16.
    "bfloat16 inputs": (
        {"compute": {"dtype": "bfloat16"}},
        {"senior_activation_dtype": "bfloat16"},
    ),
    "int8": ({}, {"senior_quantization": "int8"}),
}
# Formats of llama.cpp by the names that they have here.
_LLAMA = {"float32": "f32", "bfloat16": "bf16", "bfloat16 inputs": "bf16", "int8": "q8_0"}
_WIDE = ("float32", "bfloat16", "bfloat16 inputs")
_BARS = {1: 1.0, 4: 1.2, 8: 1.3, 16: 1.5}
_BARS_8_BIT = {1: 1.0, 4: 1.5, 8: 1.5, 16: 1.5}
_BARS_TRANSFORMERS = {1: 4.0, 16: 3.5}
_GREEDY_TOKENS = 16
_NO_SIDE = "a side is skipped or not supported"


def run(bench: Bench) -> None:
    """Measures the section."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        written = {}
        prompt = list(range(1000, 1000 + bench.options.prompt_tokens))
        for form, (settings, asked) in _OURS.items():
            name = f"tandem {form}"
            settings = {"senior_model": str(bench.options.model), **settings}
            server = bench.start(stack, name, bench.server(settings, asked))
            if server is not None:
                sides[name] = RolloutSide(server, OFF)
                written[name] = greedy(server, prompt, _GREEDY_TOKENS)
        for theirs in dict.fromkeys(_LLAMA.values()):
            name = f"llama.cpp {theirs}"
            if bench.options.skips(name):
                continue
            sides[name] = driver = stack.enter_context(bench.llama(theirs))
            ids = " ".join(map(str, prompt))
            written[name] = driver.ask(f"greedy {_GREEDY_TOKENS} {ids}")["token_ids"]
        if written:
            _print_agreement(written)
        for dtype in ("float32", "bfloat16"):
            name = f"transformers {dtype}"
            if not bench.options.skips(name):
                sides[name] = TransformersSide(bench.options.model, getattr(torch, dtype))
        for count in bench.options.counts:
            turns = bench.take_turns(sides, bench.options.job(count))
            if count == 1:
                _against_memory(bench, turns)
            _against_llama(bench, turns)
            _against_transformers(bench, turns)
            _prefill(bench, turns)


def _number(form: str) -> str:
    """The type of the weights of a form."""
    return form.removesuffix(" inputs")


def _print_agreement(written: dict[str, list[int]]) -> None:
    """Prints how many of each side's greedy tokens, from the first on, are those of one side."""
    first, tokens = next(iter(written.items()))
    print(f"\ngreedy tokens as {first} writes them, of {_GREEDY_TOKENS}")
    for name, others in written.items():
        pairs = zip(tokens, others, strict=True)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        print(f"  {name:28} {sum(1 for _ in same)}")


def _against_memory(bench: Bench, turns: Turns) -> None:
    for form in _OURS:
        figure = f"solo decode, 1 sequence, {form}: weights read by memory bandwidth"
        name = f"tandem {form}"
        if name not in turns:
            bench.table.missing(figure, _NO_SIDE)
            continue
        costs = Costs.of(bench.options.model, _number(form))
        rate = turns.rate(name, Phase.DECODE)
        read = rate * costs.weight_bytes
        detail = f"{read / 1e9:.1f} of {bench.limits.read_bytes / 1e9:.1f} GB/s"
        bench.table.at_least(figure, read / bench.limits.read_bytes, 0.85, detail)


def _against_llama(bench: Bench, turns: Turns) -> None:
    count = turns.job.sequences
    for forms, bars in ((_WIDE, _BARS), (("int8",), _BARS_8_BIT)):
        if count not in bars:
            continue
        label = "8-bit" if forms == ("int8",) else "the better of fp32 and bf16"
        figure = f"solo decode, {counted(count)}: {label}, by llama.cpp's"
        ours = turns.fastest([f"tandem {form}" for form in forms], Phase.DECODE)
        theirs = turns.fastest([f"llama.cpp {_LLAMA[form]}" for form in forms], Phase.DECODE)
        if ours is None or theirs is None:
            bench.table.missing(figure, _NO_SIDE)
            continue
        bench.table.at_least(
            figure, turns.ratio(ours, theirs, Phase.DECODE), bars[count], f"{ours}, {theirs}"
        )


def _against_transformers(bench: Bench, turns: Turns) -> None:
    count = turns.job.sequences
    if count not in _BARS_TRANSFORMERS:
        return
    figure = f"solo decode, {counted(count)}, by transformers in bf16"
    ours = turns.fastest([f"tandem {form}" for form in _WIDE], Phase.DECODE)
    theirs = "transformers bfloat16"
    if ours is None or theirs not in turns:
        bench.table.missing(figure, _NO_SIDE)
    else:
        ratio = turns.ratio(ours, theirs, Phase.DECODE)
        bench.table.at_least(figure, ratio, _BARS_TRANSFORMERS[count], ours)


def _prefill(bench: Bench, turns: Turns) -> None:
    count = turns.job.sequences
    for form in _WIDE:
        ours = f"tandem {form}"
        figure = f"prefill, {count} x {turns.job.prompt_tokens} tokens, {form}"
        peers = [f"llama.cpp {_LLAMA[form]}", f"transformers {_number(form)}"]
        theirs = turns.fastest(peers, Phase.PREFILL)
        if ours not in turns or theirs is None:
            bench.table.missing(figure, _NO_SIDE)
            continue
        ratio = turns.ratio(ours, theirs, Phase.PREFILL)
        bar = 1.1 if form == "bfloat16 inputs" else 1.2
        bench.table.at_least(f"{figure}, by the faster peer", ratio, bar, theirs)
        costs = Costs.of(bench.options.model, _number(form))
        flops = turns.rate(ours, Phase.PREFILL) * costs.prompt_flops
        peak = bench.limits.product_flops(_number(form))
        detail = f"{flops / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s"
        bench.table.at_least(f"{figure}, by the products' peak", flops / peak, 0.7, detail)
