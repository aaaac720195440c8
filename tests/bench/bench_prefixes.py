"""Train steps of groups whose prompt stands once in a micro-batch, beside the same steps without.

    .venv/bin/python tests/bench/bench_prefixes.py [--model DIR] [--samples 8] [--prompt 512]
        [--response 64] [--rounds 3]

Two trainers make GRPO steps on the same samples, in fp32, on the same cores in turn: forward, loss,
backward and AdamW. The samples have recorded log-probabilities, so that a step has no other pass.
Faults are pages of memory that a step touched for the first time, from /proc.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from alternate import Comparison
from tandem._proto.types.v1 import trajectory_pb2
from tandem.cluster.local import LocalCluster
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import PolicySample, SupervisedSample
from tandem.rpc.wire import from_tensor, to_message, to_tensor
from tandem.settings.cluster import ClusterSettings

_PEER = "without sharing"
_BAR = 3.0
_SHAPE_OF_BAR = (8, 512, 64)  # samples, tokens of the prompt and of a response


def _samples(client: TrainerClient, options: argparse.Namespace) -> list[PolicySample]:
    """Groups of random tokens, with the log-probabilities that the trainer's weights give them."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(20_000, (count,), generator=generator).tolist()

    samples = []
    for group in range(options.groups):
        prompt = tokens(options.prompt)
        responses = [tokens(options.response) for _ in range(options.samples)]
        replies = client.compute_log_probs([SupervisedSample(prompt, r) for r in responses])
        for i, (response, reply) in enumerate(zip(responses, replies, strict=True)):
            logprobs = to_tensor(from_tensor(reply.logprobs))
            trajectory = trajectory_pb2.Trajectory(
                prompt_token_ids=prompt,
                response_token_ids=response,
                authorship_mask=bytes([1] * len(response)),
                author_logprobs=logprobs,
                senior_versions=[
                    trajectory_pb2.VersionRun(
                        weights=client.info().server.weights, count=len(response)
                    )
                ],
                finish_reason=trajectory_pb2.FINISH_REASON_STOP,
            )
            sampling = {"temperature": 1.0, "max_tokens": options.response}
            to_message(sampling, trajectory.sampling, "sampling")
            to_message({"enabled": False}, trajectory.tandem, "tandem")
            samples.append(PolicySample(trajectory, f"{group}", reward=float(i % 3)))
    return samples


def _stepper(
    client: TrainerClient, samples: list[PolicySample], options: argparse.Namespace
) -> Callable[[], dict[str, float]]:
    """Makes the next step of a run; returns its metrics."""
    steps = itertools.count(1)

    def step() -> dict[str, float]:
        number = next(steps)
        report = client.train_step(
            samples,
            run_id="bench",
            step=number,
            expected_version=number - 1,
            objective={"max_staleness": options.rounds + 1},
        ).report
        return dict(report.metrics)

    return step


def _faults(pid: int) -> int:
    """Pages that a process has touched for the first time."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    sides: dict[str, tuple[int, Callable[[], dict[str, float]]]] = {}
    with ExitStack() as stack:
        for name, shares in ((_PEER, False), ("shared prefixes", True)):
            trainer = {
                "model": str(options.model),
                "batch": {
                    "micro_batch_tokens": options.micro_batch_tokens,
                    "shared_prefixes": shares,
                },
            }
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cluster = stack.enter_context(
                LocalCluster(ClusterSettings(directory=directory, trainer=trainer))
            )
            client = stack.enter_context(TrainerClient(cluster.trainer.address))
            step = _stepper(client, _samples(client, options), options)
            sides[name] = (cluster.trainer.process.pid, step)
        print(
            f"{options.groups} groups of {options.samples}, prompt {options.prompt}, "
            f"responses {options.response}, fp32"
        )
        tokens = options.groups * options.samples * (options.prompt + options.response)
        comparison = Comparison(peer=_PEER, unit="tokens", pids=[pid for pid, _ in sides.values()])
        faults: dict[str, int] = {}
        metrics: dict[str, dict[str, float]] = {}
        for turn in range(options.rounds + 1):
            for name, (pid, step) in sides.items():
                before = _faults(pid)
                comparison.start()
                reported = step()
                comparison.stop(name, tokens)
                faults[name] = _faults(pid) - before
                if turn == 0:
                    metrics[name] = reported
        ratios, cpu = comparison.report(), comparison.cpu_ratios()
    shared = metrics["shared prefixes"]
    print(f"  CPU time of a step without sharing: {1 / cpu['shared prefixes']:.2f} of one with")
    print(f"  tokens that are shared: {shared['policy/shared_token_fraction']:.3f}")
    print(f"  pages touched first in the last step: {faults}")
    for key in ("loss/total", "policy/grad_norm", "mismatch/max_abs_logprob_diff"):
        print(f"  {key} of the first step: {metrics[_PEER][key]:.9g}, shared {shared[key]:.9g}")
    if (options.samples, options.prompt, options.response) == _SHAPE_OF_BAR:
        met = "met" if ratios["shared prefixes"] >= _BAR else "missed"
        print(f"  bar: {_BAR} x {_PEER}, {met}")


if __name__ == "__main__":
    main()
