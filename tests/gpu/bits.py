"""Whether log-probabilities have the same bits in any company, and in the trainer: bits.py --help

It compares responses that a rollout server draws alone and together, their scores alone and
together, the scores with what was drawn, and the trainer's log-probabilities with what was drawn.
It fails where nothing can be compared, and not where bits differ: how many are the same is what it
measures. It also counts how many different bits a row of one product has by the number of rows,
where cuBLAS may divide sums (split-K) and where it may not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ceilings
import harness
import numpy as np
import torch
from rows import Rows
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor

SAMPLES = 16
PRODUCT = (4864, 896)  # inputs and outputs of a map of Qwen2.5-0.5B, with few outputs for long sums
COMPANY = (1, 2, 4, 8, 16, 17, 64, 256, 1000, 4096)  # numbers of rows of a product
SAMPLING = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}


def share(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns the share of numbers with the same bits, and the largest difference."""
    a, b = np.concatenate(ours), np.concatenate(theirs)
    assert a.size and a.dtype == b.dtype == np.float32 and np.isfinite(a).all()
    return float((a == b).mean()), float(np.abs(a - b).max())


def measure(models: harness.Models, compute: dict) -> dict[str, float]:
    """Returns what is the same in servers of these settings."""
    with (
        tempfile.TemporaryDirectory() as folder,
        harness.cluster(
            Path(folder),
            models,
            rollout={"compute": compute},
            trainer={"compute": compute},
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        batch = harness.prompts(
            SAMPLES, harness.TANDEM["word"], sampling=SAMPLING, return_other_logprobs=True
        )
        drawn = harness.flat(rollout.generate(batch))
        alone = harness.flat([rollout.generate([prompt])[0] for prompt in batch])
        texts = [
            ([*t.prompt_token_ids, *harness.tokens(t)], len(t.prompt_token_ids)) for t in drawn
        ]
        scores = rollout.score(texts).sequences
        alone_scores = [rollout.score([text]).sequences[0] for text in texts]
        replies = trainer.compute_log_probs(
            [SupervisedSample(t.prompt_token_ids, harness.tokens(t)) for t in drawn]
        )
    of_drawn = [harness.logprobs(t, "senior") for t in drawn]
    of_scores = [from_tensor(score.senior_logprobs) for score in scores]
    of_alone_scores = [from_tensor(score.senior_logprobs) for score in alone_scores]
    of_trainer = [from_tensor(reply.logprobs) for reply in replies]
    same = [
        harness.response_bytes(a) == harness.response_bytes(b)
        for a, b in zip(drawn, alone, strict=True)
    ]
    found = {"samples": float(np.mean(same))}
    for name, pair in {
        "scores": (of_scores, of_alone_scores),
        "drawn_and_scored": (of_drawn, of_scores),
        "rollout_and_trainer": (of_drawn, of_trainer),
    }.items():
        found[name], found[f"{name}_apart"] = share(*pair)
    return found


def product(device: str, dtype: torch.dtype, splits: bool) -> dict[str, float]:
    """Returns into how many classes of bits one row of a long product falls by its company, and the
    milliseconds of the product of 16 rows; `splits`: whether cuBLAS may divide sums (split-K)."""
    if device == "cuda":
        torch.backends.cuda.preferred_blas_library("default" if splits else "cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (splits, splits)
    weight = torch.randn(PRODUCT[1], PRODUCT[0], device=device, dtype=dtype)
    x = torch.randn(max(COMPANY), PRODUCT[0], device=device, dtype=dtype)
    found = {bytes((x[:n] @ weight.T)[0].float().cpu().numpy()) for n in COMPANY}
    took = ceilings.seconds(device, lambda: x[:16] @ weight.T, 20)
    return {"classes": len(found), "ms": round(1000 * took, 4)}


def main() -> None:
    """Measures with products of any number of rows, and on a GPU with products of fixed rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("rows")
    for name in ("device", "shape", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    suffix = "" if args.dtype == "bfloat16" else "-fp32"
    senior = args.models / f"{args.shape}{suffix}"
    junior = args.models / f"{args.shape}-junior{suffix}"
    compute = {"device": args.device, "dtype": args.dtype, "num_threads": 1}
    rows = Rows(args.rows)
    for product_rows in (0, 256) if args.device == "cuda" else (0,):
        fixed = {"product_rows": product_rows} if args.device == "cuda" else {}
        found = measure(harness.Models(senior, junior, senior), compute | fixed)
        rows.add(dtype=args.dtype, product_rows=product_rows, **found)
    for splits in (True, False) if args.device == "cuda" else (True,):
        found = product(args.device, getattr(torch, args.dtype), splits)
        rows.add(dtype=args.dtype, splits=splits, **found)


if __name__ == "__main__":
    main()
