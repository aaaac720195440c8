"""Episodes of three turns on a rollout server, in which an environment speaks twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tandem
from harness import flat
from tandem._proto.types.v1 import trajectory_pb2
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt, ResponseSoFar

# Ids that an environment says; one begins a word, where the strategies have boundaries.
SAID = ([7, 31, 200], [5], [44, 45, 46, 47, 48, 49])


def continued(
    prompt: Prompt, response: trajectory_pb2.Trajectory, *, said: Sequence[int] = (), **changes: Any
) -> Prompt:
    """The prompt that continues `response`, a whole one, behind what an environment said."""
    return dataclasses.replace(
        prompt,
        request_id="",
        num_samples=1,
        first_sample_index=response.sample_index,
        response=ResponseSoFar.after(response, said),
        **changes,
    )


def episodes(
    client: RolloutClient, batch: Sequence[Prompt]
) -> list[list[trajectory_pb2.Trajectory]]:
    """Draws the samples of prompts with three turns each; returns them joined, by prompt."""
    groups = client.generate(batch)
    for said in SAID[:2]:
        asked = [
            continued(prompt, one, said=said)
            for prompt, group in zip(batch, groups, strict=True)
            for one in group
        ]
        turns = iter(flat(client.generate(asked)))
        groups = [[tandem.join(one, said, next(turns)) for one in group] for group in groups]
    return groups
