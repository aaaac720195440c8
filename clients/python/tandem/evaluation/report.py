"""Evaluations as text: in a sentence, and as cells of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.evaluation.gate import Gate, Group
from tandem.evaluation.handoff import MAX_ROUNDS
from tandem.terminal.output import cell
from tandem.utils.words import counted


@dataclass(frozen=True)
class Measure:
    """One number of an evaluation, as text.

    Attributes:
        interval: the 95 % interval; "" where there is none.
    """

    name: str
    value: str
    interval: str = ""


def measures(summary: Mapping[str, Any]) -> list[Measure]:
    """Returns the numbers of a summary, the most telling first."""
    found = []
    if "accuracy" in summary:
        found.append(_with_interval("accuracy", summary, "accuracy", "{:.1%}"))
        passes = summary["pass_at"]
        # pass@1 alone would repeat the accuracy; beside others it is there for comparison.
        if set(passes) != {"1"}:
            found += [Measure(f"pass@{k}", f"{value:.1%}") for k, value in passes.items()]
        # Where every reward is 0 or 1 the mean is the accuracy.
        mean = summary["reward/mean"]
        if mean is not None and mean != summary["accuracy"]:
            found.append(Measure("mean reward", f"{mean:.3f}"))
        if failed := summary["reward/failed"]:
            found.append(Measure("rewards failed", f"{failed:,}"))
    if "rounds/mean" in summary:
        found.append(Measure("rounds", f"{summary['rounds/mean']:.2f}"))
    if "taken_over" in summary:
        found.append(Measure("answers taken over", f"{summary['taken_over']:,}"))
    if "tandem/senior_token_fraction" in summary:
        share = summary["tandem/senior_token_fraction"]
        found.append(Measure("tokens by the senior", f"{share:.1%}"))
    if "rounds/cut" in summary:
        found.append(Measure(f"cut after {MAX_ROUNDS} rounds", f"{summary['rounds/cut']:,}"))
    found += [
        Measure(f"answers with {key.removeprefix('pattern/')}", f"{value:.1%}")
        for key, value in summary.items()
        if key.startswith("pattern/")
    ]
    for whose in ("junior", "senior", "gap"):
        if (key := f"{whose}/nats_per_token") in summary:
            found.append(_with_interval(f"{whose}, nats/token", summary, key, "{:.3f}"))
    return found


def gate_rows(gate: Gate) -> list[list[str]]:
    """Returns the lines of a table of the gate: one for each author, and two for each pattern."""

    def line(name: str, group: Group, equal: str = "") -> list[str]:
        return [
            name,
            f"{group.share:.0%}",
            cell(group.accuracy, "{:.1%}"),
            cell(group.reward, "{:.3f}"),
            cell(group.tokens, "{:.1f}"),
            equal,
        ]

    rows = [
        line(author, group, f"{gate.equal_groups[author]:.0%}")
        for author, group in gate.authors.items()
    ]
    for name, (matching, other) in gate.patterns.items():
        rows += [line(f"senior, with {name}", matching), line(f"senior, without {name}", other)]
    return rows


def draft_rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the lines of a table of drafts, with a cell for each of the results."""
    forms = {
        "tokens per second, without drafts": ("tokens_per_second_without", "{:.1f}"),
        "tokens per second, with drafts": ("tokens_per_second", "{:.1f}"),
        "times as fast": ("speed_up", "{:.2f}"),
        "… at least (95 % interval)": ("speed_up_low", "{:.2f}"),
        "… at most": ("speed_up_high", "{:.2f}"),
        "response tokens": ("response_tokens", "{:,}"),
        "drafts verified": ("draft_tokens", "{:,}"),
        "drafts accepted": ("accepted_draft_tokens", "{:,}"),
        "share accepted": ("acceptance_rate", "{:.1%}"),
        "mean accepted length": ("mean_accepted_length", "{:.2f}"),
        "tokens that needed no pass": ("free_fraction", "{:.1%}"),
        "responses that differ": ("responses_that_differ", "{:,}"),
    }
    return [
        [name, *(cell(one[key], form) for one in results)] for name, (key, form) in forms.items()
    ]


def size(summary: Mapping[str, Any]) -> str:
    """Returns the numbers of prompts and samples in words."""
    prompts, samples = counted(summary["prompts"], "prompt"), counted(summary["samples"], "sample")
    return f"{prompts}, {samples} each"


def in_words(summary: Mapping[str, Any]) -> str:
    """Returns a summary as a sentence."""
    said = (
        f"{one.name} {one.value}" + (f" (95 % interval {one.interval})" if one.interval else "")
        for one in measures(summary)
    )
    return f"{summary['mode']}: {', '.join(said)}; {size(summary)}"


def _with_interval(name: str, summary: Mapping[str, Any], key: str, form: str) -> Measure:
    low, high = summary[f"{key}_low"], summary[f"{key}_high"]
    interval = "" if low is None else f"{form.format(low)} to {form.format(high)}"
    return Measure(name, form.format(summary[key]), interval)
