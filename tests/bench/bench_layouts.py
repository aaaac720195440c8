"""Training on two ranks beside one process, PyTorch's DDP and FSDP2; and the memory of a rank.

    .venv-peers/bin/python tests/bench/bench_layouts.py [--rounds 5] [--sides single,zero-3,fsdp2]
    .venv-peers/bin/python tests/bench/bench_layouts.py --experts 8

All sides train the same random Llama on the same batch, in fp32, in turns; with --experts a
Qwen3-MoE of as many experts, two for a token. Every rank has one thread. Efficiency is the rate of
two ranks divided by twice the rate of one process. Memory is anonymous resident memory beyond that
of the process without a model, compared with the formulas of docs/internals/layouts.md; the
process groups count the bytes that they send.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from alternate import alternate
from tandem.cluster.local import find_binary, held_port, rank_environment
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

# Settings of a trainer's `strategy`.
OURS: Mapping[str, list[str]] = {
    "single": [],
    "zero-1": ["name=zero", "stage=1"],
    "zero-2": ["name=zero", "stage=2"],
    "zero-3": ["name=zero", "stage=3"],
    "data": ["name=megatron"],
    "tensor": ["name=megatron", "tensor_model_parallel_size=2"],
    "pipeline": ["name=megatron", "pipeline_model_parallel_size=2"],
    "interleaved": [
        "name=megatron",
        "pipeline_model_parallel_size=2",
        "virtual_pipeline_model_parallel_size=2",
    ],
    "context": ["name=megatron", "context_parallel_size=2"],
    "expert": ["name=megatron", "expert_model_parallel_size=2"],
}
# Without --experts every side but the last of these, with it these alone.
OF_EXPERTS = ("single", "data", "tensor", "expert")
PEERS = ("ddp", "fsdp2")
# fp32 values that a rank holds per parameter of the model: weights, gradients, two moments.
HELD = {
    "single": 4.0,
    "zero-1": 1 + 1 + 2 / 2,
    "zero-2": 1 + 1 / 2 + 2 / 2,
    "zero-3": 1 / 2 + 1 / 2 + 2 / 2,
    "data": 1 + 1 + 2 / 2,
    "tensor": 4 / 2,
}
# Bytes that each of two ranks sends per byte of the parameters (ZeRO, section 7): gradients are
# reduced and parameters gathered. `rounds` is the number of micro-batches per rank, `ends` the
# fraction of parameters in the embedding and the last block, which stage 3 does not gather again
# for the backward pass.
SENT = {
    "zero-1": lambda rounds, ends: 1 / 2 + 1 / 2,
    "zero-2": lambda rounds, ends: rounds / 2 + 1 / 2,
    "zero-3": lambda rounds, ends: rounds / 2 + rounds * (2 - ends) / 2,
    "data": lambda rounds, ends: 1 / 2 + 1 / 2,
}
PER_TOKEN = 2  # experts


def sent_to_experts(options: argparse.Namespace, parameters: int) -> float:
    """The bytes that each of two expert parallel ranks sends, where half of the choices leave it.

    Gradients of all but the experts are reduced, and these parameters gathered. Of a layer, the
    numbers of rows travel, then rows and outputs, and back the gradients of both.
    """
    experts = options.layers * options.experts * 3 * options.hidden * width_of_expert(options)
    rounds = options.micro_batches // 2
    rows = options.sequences * options.tokens * PER_TOKEN / 2
    exchanged = 8 * options.experts // 2 + 4 * rows * 4 * options.hidden
    return 4 * (parameters - experts) + options.layers * rounds * exchanged


def width_of_expert(options: argparse.Namespace) -> int:
    """The width with which a token's experts have that of the dense model."""
    return 11 * options.hidden // 4 // PER_TOKEN


# Idle time of two equal stages as a fraction of their work, for m micro-batches: (p-1)/m and
# (p-1)/(m v).
BUBBLES = {
    "pipeline": lambda micro_batches: 1 / micro_batches,
    "interleaved": lambda micro_batches: 1 / (2 * micro_batches),
}


def idle_of_stages(work: list[float], bubble: float) -> float:
    """Idle time of two unequal stages as a fraction of their `work`, the CPU seconds of each.

    The longer stage, which has the head, idles only during the shorter one's first and last
    micro-batch.
    """
    return 2 * (max(work) + bubble * min(work)) / sum(work) - 1


@dataclass
class Side:
    """The processes of one layout."""

    name: str
    processes: list[subprocess.Popen[str]]
    answers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, command: list[str], ranks: int) -> Side:
        """Starts the processes and waits until all are ready."""
        port = held_port()
        processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
                | rank_environment(rank, ranks, port.getsockname()[1]),
            )
            for rank in range(ranks)
        ]
        side = cls(name, processes)
        side.read()
        port.close()
        return side

    def read(self) -> None:
        """Reads an answer of every rank into `answers`."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            sys.exit(f"{self.name} ended")
        self.answers = [json.loads(line) for line in lines]

    def do(self, command: str) -> list[dict[str, Any]]:
        """Sends a command to all ranks, and returns their answers."""
        for process in self.processes:
            process.stdin.write(command + "\n")
            process.stdin.flush()
        self.read()
        return self.answers

    def stop(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--sides")
    options = parser.parse_args()
    if options.sides is None:
        dense = [side for side in [*OURS, *PEERS] if side != "expert"]
        options.sides = ",".join(OF_EXPERTS if options.experts else dense)
    with tempfile.TemporaryDirectory() as directory:
        measure(options, Path(directory))


def measure(options: argparse.Namespace, directory: Path) -> None:
    """Times the sides in turns, and prints their rates, volumes and memory."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 11 * options.hidden // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
        "vocab_size": options.vocabulary,
        "tie_word_embeddings": False,
    }
    if options.experts:
        config = Qwen3MoeConfig(
            **sizes,
            head_dim=64,
            num_experts=options.experts,
            num_experts_per_tok=PER_TOKEN,
            moe_intermediate_size=width_of_expert(options),
        )
        model = Qwen3MoeForCausalLM(config)
        for layer in model.model.layers:  # their routers begin as zeros
            torch.nn.init.normal_(layer.mlp.gate.weight)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(directory / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    tokens = options.micro_batches * options.sequences * options.tokens
    print(f"{parameters:,} parameters, {tokens:,} tokens a step, fp32, one thread a rank")

    shape = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in SHAPE]
    ours = [find_binary("tandem-layout-bench"), f"--model={directory / 'model'}", *shape]
    ours += [f"--export-directory={directory / 'exported'}"]
    peer = [sys.executable, str(Path(__file__).with_name("torch_layout_peer.py"))]
    peer += [f"--model={directory / 'model'}", *shape]
    sides = {}
    for name in options.sides.split(","):
        settings = [f"strategy.{setting}" for setting in OURS.get(name, [])]
        command = [*map(str, ours), *settings] if name in OURS else [*peer, "--parallel", name]
        sides[name] = Side.start(name, command, 1 if name == "single" else 2)

    pipelines = [name for name in BUBBLES if name in sides]
    idle: dict[str, list[float]] = {name: [] for name in pipelines}
    work: dict[str, list[list[float]]] = {name: [] for name in pipelines}

    def step(side: Side) -> int:
        answers = side.do("step")
        if side.name in idle:
            busy = [answer["cpu_seconds"] for answer in answers]
            work[side.name].append(busy)
            idle[side.name].append(sum(answer["seconds"] for answer in answers) / sum(busy) - 1)
        return tokens

    pids = [process.pid for side in sides.values() for process in side.processes]
    ratios = alternate(
        {name: lambda side=side: step(side) for name, side in sides.items()},
        peer=next(iter(sides)),
        rounds=options.rounds,
        unit="tokens",
        pids=pids,
    )
    report(sides, ratios, parameters, options)
    for name in pipelines:
        bubble = BUBBLES[name](options.micro_batches)
        of_stages = statistics.median(idle_of_stages(busy, bubble) for busy in work[name][1:])
        print(
            f"  {name:11} idle for {statistics.median(idle[name][1:]):.3f} of its work; the "
            f"schedule's bubble is {bubble:.3f}, with stages as unequal as these {of_stages:.3f}"
        )
    for side in sides.values():
        side.stop()


SHAPE = ("micro-batches", "sequences", "tokens")


def report(
    sides: Mapping[str, Side],
    ratios: Mapping[str, float],
    parameters: int,
    options: argparse.Namespace,
) -> None:
    """Prints efficiency, sent bytes and memory of every side."""
    rounds = options.micro_batches // 2
    ends = (2 * options.vocabulary + 1) * options.hidden / parameters
    for name, side in sides.items():
        said = [f"  {name:11}"]
        if len(side.processes) == 2:
            said.append(f"efficiency {ratios[name] / 2:.2f}")
        sent = max(answer.get("sent_bytes", 0) for answer in side.answers)
        if name == "expert" or name in SENT:
            expected = (
                sent_to_experts(options, parameters)
                if name == "expert"
                else SENT[name](rounds, ends) * 4 * parameters
            )
            said.append(f"sent {sent / 1e6:.1f} MB ({sent / expected:.4f} of the formula)")
        memory = side.do("memory")
        held = max(answer["bytes"] for answer in memory)
        peak = max(answer["peak_bytes"] for answer in memory)
        formula = ""
        if name in HELD:
            formula = f" ({held / (HELD[name] * 4 * parameters):.3f} of the formula)"
        said.append(f"holds {held / 1e6:.0f} MB{formula}, at most {peak / 1e6:.0f} MB")
        if name in OURS:
            for what in ("digest", "export"):
                side.do(what)
                grown = max(answer["peak_bytes"] - held for answer in side.do("memory"))
                said.append(f"{what} takes {grown / 1e6:.0f} MB more")
        print(said[0], ", ".join(said[1:]), flush=True)


if __name__ == "__main__":
    main()
