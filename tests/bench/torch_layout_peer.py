"""Training of a `transformers` model by PyTorch's own DDP or FSDP2, as bench_layouts.py drives it.

It is one rank, configured by torchrun's environment variables; its commands and answers are those
of tandem-layout-bench.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from status_bytes import status_bytes
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


def main() -> None:
    """Answers every line of the input with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = status_bytes("RssAnon")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    sharded = options.parallel == "fsdp2"
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = torch.arange(1, options.tokens + 1) * 7919
    batch = torch.stack([rows + 104729 * s for s in range(options.sequences)])
    own = options.micro_batches // dist.get_world_size()

    def step() -> None:
        optimizer.zero_grad(set_to_none=sharded)
        for i in range(own):
            last = i + 1 == own
            with contextlib.nullcontext() if sharded or last else model.no_sync():
                inputs = batch % (model if sharded else model.module).config.vocab_size
                (model(inputs, labels=inputs).loss / own).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    libc = ctypes.CDLL("libc.so.6")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answer: dict[str, int] = {}
        if line.strip() == "step":
            step()
        else:
            libc.malloc_trim(0)  # freed memory does not count as held
            answer["bytes"] = status_bytes("RssAnon") - before
            answer["peak_bytes"] = status_bytes("VmHWM") - status_bytes("RssFile") - before
            Path("/proc/self/clear_refs").write_text("5")
        print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
