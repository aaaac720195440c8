"""Trajectories as one self-contained HTML file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tandem.text import TextCodec
from tandem.view.trajectories import Trajectory


def page(
    name: str,
    codec: TextCodec,
    trajectories: Iterable[Trajectory],
    *,
    advantage: bool,
    gap: bool,
    drafts: bool,
) -> str:
    """Returns the HTML page of a run called `name`.

    `advantage`, `gap` and `drafts` say what it shows when it opens. Its data is JSON, one block for
    each step: [group, …] as _group() makes them. The files in page/ hold its text, look and
    behaviour.
    """
    environment = Environment(
        loader=PackageLoader("tandem.view", "page"), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html").render(
        run={
            "name": name,
            "advantage": advantage,
            "drafts": drafts,
            "shade": "gap" if gap else "none",
        },
        steps=_steps(codec, trajectories),
    )


def _steps(codec: TextCodec, trajectories: Iterable[Trajectory]) -> Iterator[list[dict[str, Any]]]:
    for _, step in itertools.groupby(trajectories, key=lambda one: one.step):
        groups = itertools.groupby(step, key=lambda one: one.record["group_id"])
        yield [_group(codec, list(members)) for _, members in groups]


def _group(codec: TextCodec, members: Sequence[Trajectory]) -> dict[str, Any]:
    """Returns a prompt and its responses, with the keys of the trajectory files."""
    first = members[0]
    return {
        "step": first.step,
        "group_id": first.record["group_id"],
        "place": first.record.get("place"),
        "prompt": codec.decode(first.record["prompt_token_ids"]),
        "columns": first.columns,
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
                "scores": one.scores,
                "advantage": one.advantage,
                "accepted_draft_mask": one.accepted_drafts,
                "token_texts": codec.token_texts(one.record["response_token_ids"]),
            }
            for one in members
        ],
    }
