"""Supervised steps and publications beside transformers: learn.py MODELS ROWS.jsonl [--help]"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import work
from rows import Rows
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings.cluster import ClusterSettings


def ours(args: argparse.Namespace, batch: torch.Tensor, configuration: str, rows: Rows) -> None:
    """Measures steps of a trainer server, and publications to a rollout server."""
    dtype, weights, *product_rows = configuration.split(":")
    model = f"{args.models}/{args.shape}"
    compute: dict[str, Any] = {"device": args.device, "dtype": dtype, "num_threads": 4}
    if args.device == "cpu":
        compute["kernels"] = "aten"
    elif product_rows:
        compute["product_rows"] = int(product_rows[0])
    samples = [SupervisedSample(row[:1].tolist(), row[1:].tolist()) for row in batch]
    with tempfile.TemporaryDirectory() as directory:
        settings = ClusterSettings(
            directory=Path(directory),
            trainer={
                "model": model,
                "max_model_len": 4096,
                "optimizer": {"learning_rate": 1e-6},
                "batch": {"micro_batch_tokens": args.micro},
                "compute": compute | {"weight_dtype": weights},
            },
            rollout=[
                {
                    "senior_model": model,
                    "max_model_len": 1024,
                    "max_num_seqs": 16,
                    "compute": compute,
                }
            ],
        )
        with LocalCluster(settings) as cluster, TrainerClient(cluster.trainer.address) as trainer:
            times = []
            for step in range(1, 5):
                begin = time.perf_counter()
                reply = trainer.train_step(
                    samples, run_id="b", step=step, expected_version=step - 1
                )
                times.append(time.perf_counter() - begin)
            wanted = ("seconds", "memory", "loss/total")
            rows.add(
                side="tandem",
                dtype=configuration,
                tokens=batch.numel(),
                seconds=[round(x, 3) for x in times],
                tok_s=round(batch.numel() / min(times[1:])),
                metrics={
                    name: round(value, 4)
                    for name, value in dict(reply.report.metrics).items()
                    if any(word in name for word in wanted)
                },
            )
            for step in (5, 6):
                begin = time.perf_counter()
                published = trainer.publish_weights([cluster.rollouts[0].address])
                took = time.perf_counter() - begin
                rows.add(
                    side="publish",
                    dtype=configuration,
                    bytes=published.bytes,
                    seconds=round(took, 3),
                    gb_s=round(published.bytes / took / 1e9, 2),
                    failed=[r.status.message for r in published.results if r.status.code],
                )
                trainer.train_step(samples[:1], run_id="b", step=step, expected_version=step - 1)


def peer(args: argparse.Namespace, batch: torch.Tensor, configuration: str, rows: Rows) -> None:
    """Measures the same steps of transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{args.models}/{args.shape}",
        dtype=torch.bfloat16 if configuration == "bfloat16" else torch.float32,
    )
    model = model.to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        for some in batch.to(args.device).split(max(args.micro // batch.size(1), 1)):
            with torch.autocast(args.device, torch.bfloat16, enabled=configuration == "autocast"):
                loss = model(some, labels=some).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - begin)
    rows.add(
        side="transformers",
        dtype=configuration,
        seconds=[round(x, 3) for x in times],
        tok_s=round(batch.numel() / min(times[1:])),
    )


def main() -> None:
    """Measures each configuration of either side."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("models", "rows"):
        parser.add_argument(name)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--batch", default="16x512")
    parser.add_argument("--micro", type=int, default=8192)
    parser.add_argument(
        "--configurations", default="bfloat16:float32,bfloat16:float32:256,float32:float32"
    )
    parser.add_argument("--peers", default="autocast,float32")
    args = parser.parse_args()
    rows = Rows(args.rows)
    shape = tuple(map(int, args.batch.split("x")))
    config = json.loads((Path(args.models) / args.shape / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(100, config["vocab_size"], shape, generator=generator)
    operations = work.training_operations(config, *shape) / batch.numel()
    rows.add(name="operations", of_token=operations)
    for side, names in ((ours, args.configurations), (peer, args.peers)):
        for configuration in filter(None, names.split(",")):
            try:
                side(args, batch, configuration, rows)
            except Exception as error:  # the other configurations are measured all the same
                rows.add(side=side.__name__, dtype=configuration, error=repr(error)[:900])
            if args.device == "cuda":
                torch.cuda.empty_cache()
    sys.exit(rows.errors > 0)


if __name__ == "__main__":
    main()
