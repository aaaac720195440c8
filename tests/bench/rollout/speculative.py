"""One sequence with drafts of every kind beside the same sequence without."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rollout.bench import Bench
from rollout.models import write_first_layers, write_random_speculator
from rollout.servers import OFF, RolloutSide
from rollout.turns import Phase, Side

_NONE = "no drafts"
# Drafts that are right cost less than what they save, and wrong ones little: time by that without.
_BARS: dict[str, float | None] = {"ngram": 1.0, "junior": None, "heads": 1.1}
_PERIOD = 16  # tokens after which the prompt repeats itself


def run(bench: Bench) -> None:
    """Measures the section.

    The response to a prompt that repeats itself is greedy, so that n-grams are mostly right. The
    junior is the first third of the senior, and the heads are random: both are mostly wrong.
    """
    model = bench.options.model
    settings = {
        "senior_model": str(model),
        "junior_model": str(write_first_layers(bench.folder / "drafts-third", model, 1 / 3)),
        "senior_speculator": str(write_random_speculator(bench.folder / "heads", model)),
    }
    job = bench.options.job(1)
    period = [1000 + 37 * i for i in range(_PERIOD)]
    changes: dict[str, Any] = {
        "token_ids": (period * job.prompt_tokens)[: job.prompt_tokens],
        "sampling": {"max_tokens": job.new_tokens, "ignore_eos": True, "temperature": 0.0},
    }
    with ExitStack() as stack:
        server = bench.start(stack, "drafts", bench.server(settings))
        if server is None:
            return
        sides: dict[str, Side] = {_NONE: RolloutSide(server, OFF, changes=changes)}
        for method in _BARS:
            drafts = {"speculative": {"method": method}}
            sides[method] = RolloutSide(server, OFF, changes=changes | drafts)
        turns = bench.take_turns(sides, job)
        for method, bar in _BARS.items():
            figure = f"decode with drafts by decode without, in time: {method}"
            ratio = turns.ratio(method, _NONE, Phase.DECODE).inverse
            if bar is None:
                bench.table.note(figure, ratio)
            else:
                bench.table.at_most(figure, ratio, bar)
