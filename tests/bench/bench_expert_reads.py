"""Bytes that a decoded token of a mixture of experts reads, by those of the experts it chose.

    .venv/bin/python tests/bench/bench_expert_reads.py [--experts 32] [--per-token 4]

A rollout server answers prompts of one token with one token, which is one pass over one token. The
kernel marks the pages that a process touches (/proc/PID/clear_refs and smaps_rollup, pages of 4
KiB), so what a pass touches is counted, not estimated: weights, and all else that the process uses
meanwhile. The formula is that of the weights alone: attention, router and the chosen experts of
each layer, and the head.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
from pathlib import Path

import torch
from mixture import VOCABULARY, add_sizes, config_of
from rollout.machine import describe
from rollout.servers import OFF, RolloutServer
from tandem.rpc.requests import Prompt
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

_BAR = 1.1
_PR_SET_THP_DISABLE = 41  # prctl(2); processes that this one starts inherit it
_VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    # Beside weights of real sizes what else a process touches, 6 MB, is little.
    parser.set_defaults(expert_width=1024)
    parser.add_argument("--tokens", type=int, default=16, help="tokens that are measured")
    options = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl: huge pages cannot be turned off")
    print(describe())
    config = config_of(options)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        Qwen3MoeForCausalLM(config).float().save_pretrained(folder / "model")
        for dtype, value_bytes in _VALUE_BYTES.items():
            settings = {"senior_model": str(folder / "model"), "senior_dtype": dtype}
            with RolloutServer(folder / dtype, settings, sequences=1, longest=64) as server:
                touched = [_touched(server, token) for token in range(2, 2 + options.tokens)]
            chosen, all_experts = (
                value_bytes * _weights(config, count)
                for count in (config.num_experts_per_tok, config.num_experts)
            )
            ratio = statistics.median(touched) / chosen
            spread = f"{min(touched) / 1e6:.1f} to {max(touched) / 1e6:.1f}"
            print(
                f"{dtype}: a token touches {statistics.median(touched) / 1e6:.1f} MB ({spread}), "
                f"the weights of what it chose are {chosen / 1e6:.1f} MB, of all experts "
                f"{all_experts / 1e6:.1f} MB: {ratio:.2f}, bar {_BAR}, "
                f"{'met' if ratio <= _BAR else 'missed'}",
                flush=True,
            )


def _touched(server: RolloutServer, token: int) -> int:
    """Returns the bytes of the pages that the server touches while it writes one token."""
    pid = server.process.process.pid
    Path(f"/proc/{pid}/clear_refs").write_text("1")
    server.client.generate(
        [Prompt([token % VOCABULARY], sampling={"max_tokens": 1}, tandem=OFF)],
    )
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    [kilobytes] = [int(line.split()[1]) for line in lines if line.startswith("Referenced:")]
    return kilobytes * 1024


def _weights(config: Qwen3MoeConfig, experts: int) -> int:
    """Returns the number of weights that a token reads if it chooses `experts` in each layer."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    attention = config.hidden_size * config.head_dim * heads
    network = 3 * config.moe_intermediate_size * experts + config.num_experts
    layer = attention + config.hidden_size * network
    return config.num_hidden_layers * layer + config.vocab_size * config.hidden_size


if __name__ == "__main__":
    main()
