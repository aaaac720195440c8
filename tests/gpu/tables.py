"""The tables of what the parts measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rows import read_rows


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [header, ["--"] * len(header), *rows]
    return f"\n{title}\n\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def tables(logs: Path) -> str:
    """Returns the tables of what was measured so far."""
    decode = [row for row in read_rows(logs / "decode.jsonl") if "ms_per_step" in row]
    sequences = sorted({row["n"] for row in decode})
    by_side: dict[tuple[str, str], dict[int, float]] = {}
    for row in decode:
        by_side.setdefault((row["dtype"], row["side"]), {})[row["n"]] = row["ms_per_step"]
    text = _table(
        "Milliseconds a decode step, prompts of 128 tokens, by sequences:",
        ["type", "side", *map(str, sequences)],
        [[*key, *(times.get(n, "") for n in sequences)] for key, times in by_side.items()],
    )
    train = read_rows(logs / "train.jsonl")
    text += _table(
        "Training:",
        ["side", "type", "tokens/s", "seconds a step"],
        [[r["side"], r["dtype"], r["tok_s"], r["seconds"]] for r in train if "tok_s" in r],
    )
    text += _table(
        "Publication:",
        ["type", "bytes", "seconds", "GB/s"],
        [[r["dtype"], r["bytes"], r["seconds"], r["gb_s"]] for r in train if "gb_s" in r],
    )
    text += _table(
        "The fused output loss, forward and backward:",
        ["implementation", "type", "milliseconds", "products at peak"],
        [
            [r["side"], r["dtype"], r["ms"], r.get("peak_ms", "")]
            for r in read_rows(logs / "loss.jsonl")
            if "ms" in r
        ],
    )
    text += _table(
        "Shares of equal bits: samples and scores alone and together, tokens drawn and scored, "
        "rollout server and trainer (and the largest difference of these):",
        ["type", "product_rows", "samples", "scores", "drawn, scored", "rollout, trainer", ""],
        [
            [
                r["dtype"],
                r["product_rows"],
                *(f"{r[name]:.4f}" for name in ("samples", "scores", "drawn_and_scored")),
                f"{r['rollout_and_trainer']:.4f}",
                f"{r['rollout_and_trainer_apart']:.2g}",
            ]
            for r in read_rows(logs / "bits.jsonl")
        ],
    )
    errors = [
        [name, row.get("side", ""), row.get("dtype", ""), str(row["error"])[:200]]
        for name in ("decode", "train", "loss")
        for row in read_rows(logs / f"{name}.jsonl")
        if "error" in row
    ]
    return text + _table("Not measured:", ["part", "side", "type", "why"], errors)
