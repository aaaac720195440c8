"""Trajectories as one self-contained HTML file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tandem.models.tokenizer import TextCodec
from tandem.utils.authors import turns
from tandem.view.about import About
from tandem.view.trajectories import Trajectory

# Most times that a token of a prompt with images is shown one after the other.
_SHOWN_REPEATS = 4


def page(
    run: About,
    codec: TextCodec,
    trajectories: Iterable[Trajectory],
    *,
    advantage: bool,
    gap: bool,
    drafts: bool,
) -> str:
    """Returns the HTML page of a run.

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
            "name": run.name,
            "facts": run.facts,
            "curves": run.curves,
            "advantage": advantage,
            "drafts": drafts,
            "shade": "gap" if gap else "none",
        },
        steps=_steps(run, codec, trajectories),
    )


def _steps(
    run: About, codec: TextCodec, trajectories: Iterable[Trajectory]
) -> Iterator[list[dict[str, Any]]]:
    for _, step in itertools.groupby(trajectories, key=lambda one: one.step):
        groups = itertools.groupby(step, key=lambda one: one.record["group_id"])
        yield [_group(run, codec, list(members)) for _, members in groups]


def _group(run: About, codec: TextCodec, members: Sequence[Trajectory]) -> dict[str, Any]:
    """Returns a prompt and its responses, with the keys of the trajectory files."""
    first = members[0]
    return {
        "step": first.step,
        "group_id": first.record["group_id"],
        "place": first.record.get("place"),
        "prompt": _prompt(codec, first),
        "images": run.images_of(first.record.get("row")),
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
                "turns": turns(one.record["authorship_mask"]),
                "token_texts": codec.token_texts(one.record["response_token_ids"]),
            }
            for one in members
        ],
    }


def _prompt(codec: TextCodec, trajectory: Trajectory) -> str:
    """Returns a prompt with its special tokens; the many tokens of an image are counted."""
    ids = trajectory.record["prompt_token_ids"]
    texts = codec.token_texts(ids)
    if not trajectory.record.get("vision_inputs"):
        return "".join(texts)
    runs = itertools.groupby(zip(ids, texts, strict=True), key=lambda one: one[0])
    return "".join(
        f"{run[0][1]}(× {len(run)})" if len(run) > _SHOWN_REPEATS else "".join(t for _, t in run)
        for run in (list(tokens) for _, tokens in runs)
    )
