"""Trajectories as one HTML file that needs nothing else: no server, no network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tandem.text import TextCodec
from tandem.view.trajectories import Trajectory


def page(
    name: str, codec: TextCodec, trajectories: Iterable[Trajectory], *, advantage: bool, gap: bool
) -> str:
    """The page of a run called `name`, and whether it opens with advantages and log-prob gaps.

    Its data is JSON, a block for each step: [group, …] as _group() makes them. The files in page/
    are its text, look and behaviour.
    """
    environment = Environment(
        loader=PackageLoader("tandem.view", "page"), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html").render(
        run={"name": name, "advantage": advantage, "shade": "gap" if gap else "none"},
        steps=_steps(codec, trajectories),
    )


def _steps(codec: TextCodec, trajectories: Iterable[Trajectory]) -> Iterator[list[dict[str, Any]]]:
    for _, step in itertools.groupby(trajectories, key=lambda one: one.step):
        groups = itertools.groupby(step, key=lambda one: one.record["group_id"])
        yield [_group(codec, list(members)) for _, members in groups]


def _group(codec: TextCodec, members: Sequence[Trajectory]) -> dict[str, Any]:
    """A prompt and its responses; the names are those of the trajectory files."""
    first = members[0]
    return {
        "step": first.step,
        "group_id": first.record["group_id"],
        "prompt": codec.decode(first.record["prompt_token_ids"]),
        "samples": [
            {
                key: one.record[key]
                for key in (
                    "sample_index",
                    "reward",
                    "finish_reason",
                    "response_token_ids",
                    "authorship_mask",
                    "senior_logprobs",
                    "junior_logprobs",
                )
            }
            | {
                "advantage": one.advantage,
                "pieces": codec.pieces(one.record["response_token_ids"]),
            }
            for one in members
        ],
    }
