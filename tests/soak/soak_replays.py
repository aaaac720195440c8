"""Compares what a soaked server answered with the answers of an idle server."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import harness
import numpy as np
from soak_clients import Scored, Workload, shown
from soak_configurations import Configuration
from steadiness import DisturbanceError
from tandem._proto.types.v1 import tensor_pb2, trajectory_pb2
from tandem.rpc.author_schedule import authorship_mask
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt
from tandem.rpc.wire import from_tensor, tandem_record

# Part of the tokens that come before the first difference where the bits of a row depend on its
# batch: a draw may fall between two values of the same probability.
COMMON_TOKENS = 0.99


class Replays:
    """Comparisons with a server that answers one request at a time.

    Attributes:
        samples: number of responses that were generated again.
        log_probs: number of log-probs that Score computed again.
    """

    def __init__(self, configuration: Configuration, workload: Workload) -> None:
        self.samples = 0
        self.log_probs = 0
        self._numerics = configuration.numerics
        self._configuration = configuration
        self._workload = workload
        self._tokens = self._common = 0

    def compare(self, directory: Path, models: harness.Models) -> None:
        """Starts the idle server; raises DisturbanceError for an answer that is another one."""
        with (
            harness.cluster(directory, models, rollout=self._configuration.alone()) as running,
            harness.rollout_client(running) as client,
        ):
            info = client.info()
            self._boundaries = {
                "sentence": info.sentence_boundary_token_ids,
                "word": info.word_boundary_token_ids,
            }
            for version, weights in enumerate(self._workload.sets, 1):
                weights.install(client.channel, version, self._workload.num_token_ids)
                for prompt, trajectories in _by_prompt(self._workload.kept):
                    self._compare_responses(client, weights.digest, prompt, trajectories)
                for scored in self._workload.scored:
                    if scored.digest == weights.digest:
                        self._compare_scores(client, scored)
        if self._common < COMMON_TOKENS * self._tokens:
            raise DisturbanceError(
                f"{self._common} of {self._tokens} tokens are before the first difference"
            )

    def summary(self) -> str:
        """Returns the numbers of comparisons."""
        return (
            f"{self.samples} responses generated again, of {self._tokens} tokens; "
            f"{self.log_probs} log-probs scored again"
        )

    def _compare_responses(
        self,
        client: RolloutClient,
        digest: str,
        prompt: Prompt,
        trajectories: Sequence[trajectory_pb2.Trajectory],
    ) -> None:
        """Compares what was written under the weights `digest`, which the client's server has."""
        whole = []
        for trajectory in trajectories:
            written_by = {run.weights.digest for run in trajectory.senior_versions}
            if digest in written_by:
                self._compare_with_score(client, digest, trajectory)
            if written_by == {digest}:
                self._compare_authors(trajectory)
                whole.append(trajectory)
        if whole:
            # Without drafts, which must change nothing.
            [again] = client.generate([dataclasses.replace(prompt, speculative={})])
            for trajectory in whole:
                self._compare_samples(trajectory, again[trajectory.sample_index])

    def _compare_with_score(
        self, client: RolloutClient, digest: str, trajectory: trajectory_pb2.Trajectory
    ) -> None:
        prompt, response = trajectory.prompt_token_ids, harness.tokens(trajectory)
        [scores] = client.score(
            [([*prompt, *response], len(prompt))],
            junior=trajectory.tandem.enabled,
            temperature=trajectory.sampling.temperature or 1.0,
        ).sequences
        under = np.concatenate(
            [np.full(r.count, r.weights.digest == digest) for r in trajectory.senior_versions]
        )
        recorded = harness.logprobs(trajectory, "senior")
        self._require_close(shown(trajectory), recorded, scores.senior_logprobs, under)
        if trajectory.tandem.enabled:
            recorded = harness.logprobs(trajectory, "junior")
            self._require_close(shown(trajectory), recorded, scores.junior_logprobs)

    def _compare_authors(self, trajectory: trajectory_pb2.Trajectory) -> None:
        tandem = tandem_record(trajectory.tandem)
        derived = authorship_mask(
            harness.tokens(trajectory),
            tandem,
            trajectory.seed,
            trajectory.sample_index,
            self._boundaries.get(tandem["selection_strategy"], ()),
        )
        if derived != harness.mask(trajectory):
            raise DisturbanceError(f"the authors are not {derived}: {shown(trajectory)}")

    def _compare_samples(
        self, soaked: trajectory_pb2.Trajectory, alone: trajectory_pb2.Trajectory
    ) -> None:
        if self._numerics.exact:
            common = len(soaked.response_token_ids)
            if harness.response_bytes(soaked) != harness.response_bytes(alone):
                raise DisturbanceError(
                    f"alone it is another response:\n{shown(soaked)}\n{shown(alone)}"
                )
        else:
            both = zip(harness.tokens(soaked), harness.tokens(alone), strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
            expected = from_tensor(alone.author_logprobs)[:common]
            apart = np.abs(from_tensor(soaked.author_logprobs)[:common] - expected)
            if apart.max(initial=0) > self._numerics.atol:
                raise DisturbanceError(f"alone, log-probs differ by {apart.max()}: {shown(soaked)}")
        self.samples += 1
        self._tokens += len(soaked.response_token_ids)
        self._common += common

    def _compare_scores(self, client: RolloutClient, scored: Scored) -> None:
        again = client.score(
            [(scored.token_ids, scored.first)], junior=True, temperature=scored.temperature
        )
        [scores] = again.sequences
        for name in ("senior_logprobs", "junior_logprobs"):
            recorded = from_tensor(getattr(scored.scores, name))
            self._require_close(str(scored), recorded, getattr(scores, name))

    def _require_close(
        self,
        record: str,
        recorded: np.ndarray,
        again: tensor_pb2.Tensor,
        where: np.ndarray | bool = True,
    ) -> None:
        """Compares log-probs where they were recorded and `where` is true."""
        compared = ~np.isnan(recorded) & where
        apart = np.abs(recorded - from_tensor(again))[compared]
        if apart.max(initial=0) > self._numerics.atol:
            raise DisturbanceError(f"Score differs by {apart.max()}: {record}")
        self.log_probs += apart.size


def _by_prompt(
    kept: Sequence[tuple[Prompt, trajectory_pb2.Trajectory]],
) -> Iterator[tuple[Prompt, list[trajectory_pb2.Trajectory]]]:
    """Yields every prompt with its responses."""
    groups: dict[bytes, tuple[Prompt, list[trajectory_pb2.Trajectory]]] = {}
    for prompt, trajectory in kept:
        key = prompt.message().SerializeToString(deterministic=True)
        groups.setdefault(key, (prompt, []))[1].append(trajectory)
    yield from groups.values()
