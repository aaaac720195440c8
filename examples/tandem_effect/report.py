"""Results of the experiment: a table of the arms, paired comparisons with solo, and curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.utils.stats import mean_half_width
from tandem.view.curves import Curve

# The measures, as columns: a key of the last evaluation, and its format. The first is the primary
# one, which was chosen before the runs.
PRIMARY = "takeover accuracy"
MEASURES = {
    PRIMARY: ("eval/junior_takeover/accuracy", "{:.2f}"),
    "solo accuracy": ("eval/solo/accuracy", "{:.2f}"),
    "share of code": ("eval/solo/pattern/code", "{:.2f}"),
    "share of short words": ("eval/solo/pattern/short_words", "{:.2f}"),
    "junior, nats/token": ("eval/legibility/junior/nats_per_token", "{:.2f}"),
    "gap, nats/token": ("eval/legibility/gap/nats_per_token", "{:.2f}"),
    "tokens in an answer": ("tokens/answer", "{:.1f}"),
    "tokens in the loss": ("tokens/trained", "{:,.0f}"),
}
PLOTTED = (PRIMARY, "solo accuracy", "share of code", "junior, nats/token")
Results = Mapping[str, Sequence[Mapping[str, float]]]
# By arm, the curves of the run of every seed.
Runs = Mapping[str, Sequence[Mapping[str, Curve]]]


def measured(runs: Runs) -> dict[str, list[dict[str, float]]]:
    """Returns by arm, for every seed, the measures at the end and, as "start", before training."""
    return {arm: list(map(_measures_of, ofs)) for arm, ofs in runs.items()}


def _measures_of(curves: Mapping[str, Curve]) -> dict[str, float]:
    found = {}
    for name, (key, _) in MEASURES.items():
        if key in curves:
            found[name], found[f"start, {name}"] = curves[key].values[-1], curves[key].values[0]
    tokens = curves["eval/legibility/tokens/response"].values
    answers = math.prod(
        curves[f"eval/legibility/{name}"].values[-1] for name in ("prompts", "samples")
    )
    found["tokens in an answer"] = tokens[-1] / answers
    found["start, tokens in an answer"] = tokens[0] / answers
    found["tokens in the loss"] = sum(curves["policy/weighted_tokens"].values)
    return found


def tables(results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
    """Returns a table of the arms, and one of their differences from solo, seed by seed."""
    first = next(iter(results.values()))
    shown = {name: form for name, (_, form) in MEASURES.items() if name in first[0]}
    means = [
        [arm, *(_mean([one[name] for one in runs], form) for name, form in shown.items())]
        for arm, runs in results.items()
    ]
    begun = [
        _mean([one[f"start, {name}"] for one in first], form)
        if f"start, {name}" in first[0]
        else ""
        for name, form in shown.items()
    ]
    found = [(f"means of {len(first)} seeds", ["", *shown], [["before", *begun], *means])]
    if "solo" in results and len(results) > 1:
        columns = ["", PRIMARY, "seeds above, below", "sign test, p"]
        rows = [
            _against_solo(arm, runs, results["solo"])
            for arm, runs in results.items()
            if arm != "solo"
        ]
        found.append(("difference from solo, by seed", columns, rows))
    return found


def _mean(values: Sequence[float], form: str) -> str:
    mean, half = statistics.fmean(values), mean_half_width(values)
    if half is None:
        return form.format(mean)
    return f"{form.format(mean)} ({form.format(mean - half)} to {form.format(mean + half)})"


def _against_solo(
    arm: str, runs: Sequence[Mapping[str, float]], solo: Sequence[Mapping[str, float]]
) -> list[str]:
    differences = [one[PRIMARY] - other[PRIMARY] for one, other in zip(runs, solo, strict=True)]
    above, below = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    return [
        arm,
        _mean(differences, "{:+.2f}"),
        f"{above}, {below}",
        f"{sign_test(above, below):.3g}",
    ]


def sign_test(above: int, below: int) -> float:
    """Returns the two-sided p-value of this many differences above and below 0."""
    n = above + below
    tail = sum(math.comb(n, k) for k in range(min(above, below) + 1)) / 2**n
    return min(1.0, 2 * tail)


def plot(runs: Runs, file: Path) -> None:
    """Writes the curves of the evaluations: the mean over seeds, and the lowest and highest."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PLOTTED), figsize=(3.2 * len(PLOTTED), 3.2))
    for axis, name in zip(axes, PLOTTED, strict=True):
        for arm, ofs in runs.items():
            curves = [run[MEASURES[name][0]] for run in ofs]
            steps, values = curves[0].steps, list(zip(*(one.values for one in curves), strict=True))
            [line] = axis.plot(steps, [statistics.fmean(one) for one in values], label=arm)
            axis.fill_between(
                steps,
                list(map(min, values)),
                list(map(max, values)),
                color=line.get_color(),
                alpha=0.15,
            )
        axis.set_title(name)
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        ncols=len(runs),
    )
    figure.savefig(file, dpi=100, bbox_inches="tight")
