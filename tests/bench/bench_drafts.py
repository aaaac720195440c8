"""Decode of one sequence with drafts beside the same responses without, and how many are accepted.

    .venv/bin/python tests/bench/bench_drafts.py [--seen] [--model qwen2.5-0.5b --junior 0.4]

An MLP speculator is trained on the senior's own responses, as `tandem speculator train` does, and
drafts the answers to other prompts, greedily and at temperature 1. A small junior (the first layers
of the senior) and heads with random weights draft the same answers: both know nothing, so they show
the cost of drafts where none is accepted. With --seen the speculator is trained on the greedy
answers to the measured prompts themselves: that shows the gain where most are accepted. All sides
of a temperature alternate. By the exact rule every side writes the same tokens. A line has the
tokens per second of the decode, from the first token on, and beside its ratio to the decode without
drafts the one that its acceptance allows if a pass with drafts takes no longer than one without:
tokens by passes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.machine import describe
from rollout.models import (
    QWEN,
    SMOLLM2,
    model_directory,
    write_first_layers,
    write_random_speculator,
)
from rollout.servers import OFF, RolloutServer
from tandem.models.tokenizer import TextCodec
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import Prompt, SupervisedSample

_NONE = "no drafts"
_HEADS, _RANDOM, _JUNIOR = "trained heads", "random heads", "small junior"
_EXAMPLES = Path("examples/speculator")
# The chat marks of the model without the system message that its template would add.
_FORMAT = "<|im_start|>user\nWrite a sentence with {}.<|im_end|>\n<|im_start|>assistant\n"
_BATCH = 16  # responses of a training step
_GREEDY_BAR, _COST_BAR = 1.5, 1.1


@dataclasses.dataclass
class Decode:
    """The decode of some responses, one after the other."""

    seconds: float = 0.0
    tokens: int = 0  # after the first event of each response
    written: int = 0
    drafted: int = 0
    accepted: int = 0
    responses: list[list[int]] = dataclasses.field(default_factory=list)

    def write(self, server: RolloutServer, prompt: Prompt) -> None:
        """Adds the response to a prompt."""
        begun: list[tuple[float, int]] = []

        def on_event(event: Any) -> None:
            kind = event.WhichOneof("event")
            if kind == "tokens" and not begun:
                begun.append((time.perf_counter(), len(event.tokens.token_ids)))
            elif kind == "finished":
                self.drafted += event.finished.draft_tokens
                self.accepted += event.finished.accepted_draft_tokens

        [[response]] = server.client.generate([prompt], on_event=on_event)
        [(start, first)] = begun
        self.seconds += time.perf_counter() - start
        self.tokens += len(response.response_token_ids) - first
        self.written += len(response.response_token_ids)
        self.responses.append(list(response.response_token_ids))

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def allowed(self) -> float:
        """Tokens by passes."""
        return self.written / (self.written - self.accepted)


def main() -> None:
    """Trains and measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=str(SMOLLM2),
        help=f"Hugging Face directory, or {QWEN}: its shape with random weights",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=40, help="training steps of the heads")
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts of a turn")
    parser.add_argument(
        "--junior", type=float, default=0.25, help="the junior's part of the parameters"
    )
    parser.add_argument("--seen", action="store_true", help="train on the measured prompts")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = model_directory(options.model, folder)
        codec = TextCodec(model)
        speculators = {
            _HEADS: _train(folder / "training", model, codec, options),
            _RANDOM: write_random_speculator(folder / "random", model),
        }
        junior = write_first_layers(folder / "junior", model, options.junior)
        with contextlib.ExitStack() as stack:
            servers = {
                name: stack.enter_context(
                    RolloutServer(
                        folder / f"server-{place}",
                        {
                            "senior_model": str(model),
                            "senior_dtype": options.dtype,
                            "junior_model": str(junior),
                            "junior_dtype": options.dtype,
                            "senior_speculator": str(speculator),
                        },
                        sequences=1,
                        longest=256,
                    )
                )
                for place, (name, speculator) in enumerate(speculators.items())
            }
            sides: dict[str, tuple[RolloutServer, Mapping[str, Any]]] = {
                _NONE: (servers[_HEADS], {}),
                _HEADS: (servers[_HEADS], {"method": "heads"}),
                _RANDOM: (servers[_RANDOM], {"method": "heads"}),
                _JUNIOR: (servers[_HEADS], {"method": "junior"}),
            }
            measured = _measured_prompts(codec, options)
            for temperature in (0.0, 1.0):
                print(f"\n== decode at temperature {temperature:g}, {options.dtype} ==", flush=True)
                _measure(sides, measured, temperature, options.rounds)


def _measured_prompts(codec: TextCodec, options: argparse.Namespace) -> list[Prompt]:
    return _prompts(codec, "held_out.jsonl", options)[: options.prompts]


def _prompts(codec: TextCodec, file: str, options: argparse.Namespace) -> list[Prompt]:
    """Returns the prompts of a file of the example, answered by the senior alone."""
    lines = (_EXAMPLES / file).read_text().splitlines()
    return [
        Prompt(
            codec.encode(_FORMAT.format(json.loads(line)["prompt"])),
            seed=seed,
            sampling={
                "max_tokens": options.new_tokens,
                "temperature": 0.0 if options.seen else 0.7,
            },
            tandem=OFF,
            stream_tokens=True,
        )
        for seed, line in enumerate(lines)
    ]


def _train(folder: Path, model: Path, codec: TextCodec, options: argparse.Namespace) -> Path:
    """Trains heads on what the senior writes; returns the directory of the speculator."""
    trainer = {
        "model": str(model),
        "max_model_len": 256,
        "batch": {"micro_batch_tokens": 512},
        "speculator": {
            "adapter": "mlp",
            "n_predict": options.heads,
            "tie_weights": options.heads > 1,
            "scale_input": True,
            "freeze_base_model": True,
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 4},
        },
    }
    if options.seen:
        prompts = _measured_prompts(codec, options)
    else:
        prompts = _prompts(codec, "rows.jsonl", options)
    server = RolloutServer(
        folder, {"senior_model": str(model)}, sequences=_BATCH, longest=256, trainer=trainer
    )
    begin = time.perf_counter()
    with server, TrainerClient(server.cluster.trainer.address) as client:
        for step in range(1, options.steps + 1):
            first = (step - 1) * _BATCH
            batch = [
                dataclasses.replace(prompts[(first + i) % len(prompts)], seed=first + i)
                for i in range(_BATCH)
            ]
            responses = [group[0].response_token_ids for group in server.client.generate(batch)]
            report = client.train_step(
                [
                    SupervisedSample(prompt.token_ids, list(response))
                    for prompt, response in zip(batch, responses, strict=True)
                ],
                run_id="drafts",
                step=step,
                expected_version=step - 1,
            ).report
        saved = client.save_checkpoint(str(folder.resolve()), "trained")
    accuracy = [
        f"{report.metrics[f'speculator/head_{head}_accuracy']:.0%}" for head in range(options.heads)
    ]
    seconds = time.perf_counter() - begin
    print(
        f"{options.steps} training steps of {_BATCH} responses: {seconds:.0f} s, accuracy of the "
        f"heads in the last one {', '.join(accuracy)}",
        flush=True,
    )
    return Path(saved) / "speculator"


def _measure(
    sides: Mapping[str, tuple[RolloutServer, Mapping[str, Any]]],
    prompts: Sequence[Prompt],
    temperature: float,
    rounds: int,
) -> None:
    """Lets the sides take turns after a warm-up, and prints a line for each."""
    turns: dict[str, list[Decode]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, (server, speculative) in sides.items():
            decode = Decode()
            for prompt in prompts:
                sampling = {**prompt.sampling, "temperature": temperature}
                decode.write(
                    server, dataclasses.replace(prompt, sampling=sampling, speculative=speculative)
                )
            turns[name].append(decode)
    plain = turns[_NONE][1:]
    for name, all_turns in turns.items():
        counted = all_turns[1:]
        if counted[0].responses != plain[0].responses:
            raise RuntimeError(f"{name}: the responses are not those without drafts")
        ratio = statistics.median(
            mine.rate / without.rate for mine, without in zip(counted, plain, strict=True)
        )
        last = counted[-1]
        share = f"{last.accepted / last.drafted:.0%} of {last.drafted}" if last.drafted else "-"
        print(
            f"  {name:20} {statistics.median(turn.rate for turn in counted):7.1f} tokens/s"
            f"  {ratio:5.2f} x {_NONE}, accepted {share}: {last.allowed:4.2f} x is possible",
            flush=True,
        )
        if name == _HEADS and temperature == 0 and last.allowed >= _GREEDY_BAR:
            _bar(f"{_HEADS}, greedy", ratio >= _GREEDY_BAR, f"{_GREEDY_BAR} x the speed")
        if name == _RANDOM:
            _bar(f"{_RANDOM}, in time", 1 / ratio <= _COST_BAR, f"at most {_COST_BAR} x")


def _bar(what: str, met: bool, bar: str) -> None:
    print(f"  bar of {what}: {bar}, {'met' if met else 'missed'}", flush=True)


if __name__ == "__main__":
    main()
