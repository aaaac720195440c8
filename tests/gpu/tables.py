"""The tables of what the parts measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rows import read_rows


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [header, ["--"] * len(header), *rows]
    return f"\n{title}\n\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _share(rate: float, most: float | None) -> str:
    return f"{100 * rate / most:.3g} %" if most else ""


def _decoding(logs: Path, ceilings: Mapping[str, float]) -> str:
    """Returns the tables of decode steps and prompts.

    Shares are those of a single model: of the bandwidth of copies, to read the weights and the keys
    and values once a step, and of the rate of products, for the prompts.
    """
    rows = [row for row in read_rows(logs / "decode.jsonl") if "ms_per_step" in row]
    sequences = sorted({row["n"] for row in rows})
    steps: dict[tuple[str, ...], dict[int, list[str]]] = {}
    for row in rows:
        seconds, one = row["ms_per_step"] / 1000, row["side"] != "tandem"
        operations = row["prefill_operations"] / row["prefill_s"] if row["prefill_s"] else 0.0
        steps.setdefault((row["shape"], row["dtype"], row["side"]), {})[row["n"]] = [
            str(row["ms_per_step"]),
            _share(row["step_bytes"] / seconds, ceilings.get("copy")) if one and seconds else "",
            str(row["prefill_tok_s"]),
            _share(operations, ceilings.get(row["dtype"])) if one else "",
        ]
    titles = (
        "Milliseconds a decode step, prompts of 128 tokens, by sequences:",
        "The same, as a share of the bandwidth: weights, keys and values read once:",
        "Tokens of prompts a second, by sequences:",
        "The same, as a share of the rate of products:",
    )
    return "".join(
        _table(
            title,
            ["shape", "type", "side", *map(str, sequences)],
            [[*key, *(r[n][i] if n in r else "" for n in sequences)] for key, r in steps.items()],
        )
        for i, title in enumerate(titles)
    )


def _passes(logs: Path) -> str:
    """Returns the table of what a decode step asks of the GPU, from the profiles."""
    lines = []
    for rows in sorted(logs.glob("profiled-[0-9]*.jsonl")):
        [row] = [row for row in read_rows(rows) if "ms_per_step" in row] or [None]
        name = f"decode-{rows.stem.removeprefix('profiled-')}"
        for counts in sorted(logs.glob(f"{name}.counts*")) if row else ():
            begin = row["ended"] - row["decode_s"]
            during = [r for r in read_rows(counts) if begin <= r.get("t", 0) <= row["ended"]]
            if len(during) < 2:  # another process, or shorter than the counts are apart
                continue
            spent = {key: during[-1][key] - during[0][key] for key in during[0]}
            passes = spent["t"] / (row["ms_per_step"] / 1000)
            lines.append(
                [
                    row["n"],
                    *(
                        f"{spent[key] / passes:.1f}"
                        for key in ("launches", "graphs", "kernels", "syncs", "h2d", "d2h")
                    ),
                    f"{100 * (1 - spent['kernel_s'] / spent['t']):.0f} %",
                ]
            )
    return _table(
        "A decode step in the profile, and the share of its time without a kernel:",
        [
            "sequences",
            "launches",
            "graphs",
            "kernels",
            "waits",
            "copies to the GPU",
            "to the host",
            "gaps",
        ],
        lines,
    )


def tables(logs: Path) -> str:
    """Returns the tables of what was measured so far."""
    ceilings = {row["name"]: row["rate"] for row in read_rows(logs / "ceilings.jsonl")}
    text = _table(
        "The device's most: bytes copied (read and written), operations of products, a second:",
        ["what", "rate"],
        [[name, f"{rate:.3g}"] for name, rate in ceilings.items()],
    )
    text += _decoding(logs, ceilings)
    train = read_rows(logs / "train.jsonl")
    operations = next((r["of_token"] for r in train if r.get("name") == "operations"), 0.0)
    text += _table(
        "Training, and its share of the rate of bfloat16 products:",
        ["side", "type", "tokens/s", "share", "seconds a step"],
        [
            [
                r["side"],
                r["dtype"],
                r["tok_s"],
                _share(r["tok_s"] * operations, ceilings.get("bfloat16")),
                r["seconds"],
            ]
            for r in train
            if "tok_s" in r
        ],
    )
    text += _table(
        "Publication:",
        ["type", "bytes", "seconds", "GB/s"],
        [[r["dtype"], r["bytes"], r["seconds"], r["gb_s"]] for r in train if "gb_s" in r],
    )
    text += _table(
        "Steps of two ranks of ZeRO, and the share of NCCL's seconds with computation beside them:",
        ["stage", "overlap_comm", "seconds a step", "seconds of NCCL, four steps", "beside"],
        [
            [r["stage"], r["overlap"], r["seconds"], r.get("nccl_s", ""), r.get("beside", "")]
            for r in read_rows(logs / "overlap.jsonl")
            if "stage" in r
        ],
    )
    text += _table(
        "The fused output loss, forward and backward:",
        ["implementation", "type", "milliseconds", "products at peak", "MB beside the inputs"],
        [
            [r["side"], r["dtype"], r["ms"], r.get("peak_ms", ""), r.get("extra_mb", "")]
            for r in read_rows(logs / "loss.jsonl")
            if "ms" in r
        ],
    )
    bits = read_rows(logs / "bits.jsonl")
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
            for r in bits
            if "product_rows" in r
        ],
    )
    text += _table(
        "Different bits of a row of a product (4,864 inputs, 896 outputs) by the number of rows:",
        ["type", "sums may be divided (split-K)", "different bits", "milliseconds, 16 rows"],
        [[r["dtype"], r["splits"], r["classes"], r["ms"]] for r in bits if "splits" in r],
    )
    text += _passes(logs)
    errors = [
        [name, row.get("side", ""), row.get("dtype", ""), str(row["error"])[:200]]
        for name in ("decode", "train", "loss")
        for row in read_rows(logs / f"{name}.jsonl")
        if "error" in row
    ]
    return text + _table("Not measured:", ["part", "side", "type", "why"], errors)
