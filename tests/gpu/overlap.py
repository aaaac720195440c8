"""ZeRO's steps on two GPUs with and without overlap: overlap.py MODELS ROWS.jsonl PROFILER [--help]

A row has the seconds of steps, of NCCL's kernels, and the share of these beside which another
kernel ran, from steps of their own under the profiler (gpuprof.cc).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rows import Rows, read_rows
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings

RANKS = 2


def steps(args: argparse.Namespace, stage: int, overlap: bool) -> list[float]:
    """Returns the seconds of four steps of a trainer of two ranks, the first one included."""
    generator = torch.Generator().manual_seed(0)
    shape = tuple(map(int, args.batch.split("x")))
    batch = torch.randint(100, 20000, shape, generator=generator)
    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    trainer: dict[str, Any] = {
        "ranks": RANKS,
        "model": f"{args.models}/{args.shape}",
        "max_model_len": 4096,
        "optimizer": {"learning_rate": 1e-6},
        "batch": {"micro_batch_tokens": shape[0] * shape[1] // (2 * RANKS)},
        "compute": {"device": args.device, "dtype": "bfloat16", "num_threads": 4},
        "strategy": {"name": "zero", "stage": stage, "overlap_comm": overlap},
    }
    if args.device == "cpu":
        trainer["compute"]["kernels"] = "aten"
    with tempfile.TemporaryDirectory() as directory:
        settings = ClusterSettings(directory=Path(directory), trainer=trainer)
        with LocalCluster(settings) as cluster, TrainerClient(cluster.trainer.address) as client:
            seconds = []
            for step in range(1, 5):
                begin = time.perf_counter()
                client.train_step(samples, run_id="o", step=step, expected_version=step - 1)
                seconds.append(time.perf_counter() - begin)
            return seconds


def communication(args: argparse.Namespace, stage: int, overlap: bool) -> dict[str, float]:
    """Returns the seconds of NCCL's kernels on one GPU, and their share beside other kernels."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_INJECTION64_PATH": args.profiler, "GPUPROF": f"{folder}/counts"}
        try:
            steps(args, stage, overlap)
        finally:
            del os.environ["CUDA_INJECTION64_PATH"], os.environ["GPUPROF"]
        rows = [row for path in Path(folder).iterdir() for row in read_rows(path)]
    [most, *_] = sorted((row for row in rows if "nccl_s" in row), key=lambda row: -row["nccl_s"])
    return {"nccl_s": most["nccl_s"], "beside": round(most["beside_s"] / most["nccl_s"], 3)}


def main() -> None:
    """Measures stages 2 and 3."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("models", "rows", "profiler"):
        parser.add_argument(name)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--batch", default="16x512")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device == "cuda" else RANKS
    if gpus < RANKS:
        print(f"skipped: {RANKS} ranks over NCCL need as many GPUs, and this machine has {gpus}")
        return
    rows = Rows(args.rows)
    for stage in (2, 3):
        for overlap in (False, True):
            seconds = [round(x, 3) for x in steps(args, stage, overlap)]
            of_nccl = communication(args, stage, overlap) if args.device == "cuda" else {}
            rows.add(stage=stage, overlap=overlap, seconds=seconds, **of_nccl)


if __name__ == "__main__":
    main()
