"""Trajectories on a terminal, or as lines of text without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tandem.models.tokenizer import TextCodec
from tandem.terminal.output import (
    DRAFT_LEGEND,
    ENVIRONMENT_LEGEND,
    LEGEND,
    Output,
    authored_text,
    cell,
    tab_separated,
    visible,
)
from tandem.utils.authors import ENVIRONMENT, turns
from tandem.view.trajectories import Trajectory

# Smallest log-prob gap, in nats, that is written behind its token.
NOTABLE_GAP = 1.0


def print_trajectories(
    output: Output,
    codec: TextCodec,
    trajectories: Iterable[Trajectory],
    title: str,
    *,
    advantage: bool = False,
    gap: bool = False,
    drafts: bool = False,
) -> None:
    """Prints prompts with their rows, and responses by author.

    Without a terminal they are tab-separated lines, which lack the rows.

    `advantage` adds the reward's distance from its group's mean, `gap` the log-prob gap of the
    tokens where it is large, `drafts` marks and counts the accepted drafts.
    """
    first, trajectories = _peeked(trajectories)
    scores = list(first.scores) if first else []
    heads = ["reward", *scores, *(["advantage"] if advantage else [])]
    heads += ["drafts"] if drafts else []
    legend = f"{title}: {LEGEND}"
    episodes = first is not None and ENVIRONMENT in first.record["authorship_mask"]
    heads += ["turns"] if episodes else []
    if episodes:
        legend += f", {ENVIRONMENT_LEGEND}"
    if drafts:
        legend += f", {DRAFT_LEGEND}"
    if gap:
        legend += f", {{senior - junior log-prob}} from {NOTABLE_GAP:g} nat on"
    if not output.console.is_terminal:
        columns = ["group", *heads, "prompt", "response"]
        rows = (
            [
                visible(one.record["group_id"]),
                *_numbers(one, advantage=advantage, drafts=drafts, episodes=episodes),
                _prompt(codec, one, keep=""),
                _response(codec, one, gap=gap, drafts=drafts, keep=""),
            ]
            for one in trajectories
        )
        output.note(tab_separated(legend, columns, rows))
        return
    output.note(legend)
    groups = itertools.groupby(trajectories, key=lambda one: (one.step, one.record["group_id"]))
    for place, ((_, name), group) in enumerate(groups):
        members = list(group)
        rows = [
            (
                *_numbers(one, advantage=advantage, drafts=drafts, episodes=episodes),
                _response(codec, one, gap=gap, drafts=drafts, keep="\n"),
            )
            for one in members
        ]
        prompt = _prompt(codec, members[0], keep="\n").strip("\n")
        output.console.print()
        where = members[0].record.get("place")
        title = Text(visible(name), style="bold")
        output.console.print(title.append(f"  {visible(where)}" if where else "", style="dim"))
        output.console.print(Padding(Text(prompt), (0, 0, 0, 2)))
        for column, value in members[0].columns:
            shown = Text(f"{visible(column)}: ", style="dim").append(visible(value, "\n"))
            output.console.print(Padding(shown, (0, 0, 0, 2)))
        output.console.print(_table(heads, rows, show_header=place == 0))


def _peeked(
    trajectories: Iterable[Trajectory],
) -> tuple[Trajectory | None, Iterator[Trajectory]]:
    """Returns the first of the trajectories, and an iterator over all of them."""
    every = iter(trajectories)
    first = next(every, None)
    return first, every if first is None else itertools.chain([first], every)


def _table(
    heads: Sequence[str], rows: Iterable[tuple[str | Text, ...]], *, show_header: bool
) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), show_header=show_header)
    for head in heads:
        table.add_column(
            head, justify="right", no_wrap=True, min_width=len(head), header_style="dim"
        )
    # Folding shows text without spaces to its end.
    table.add_column("response", overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def _numbers(
    trajectory: Trajectory, *, advantage: bool, drafts: bool, episodes: bool
) -> Iterator[str]:
    yield cell(trajectory.record["reward"], "{:.2f}")
    for score in trajectory.scores.values():
        yield cell(score, "{:.2f}")
    if advantage:
        yield cell(trajectory.advantage, "{:+.2f}")
    if drafts:
        accepted = trajectory.accepted_drafts
        yield cell(None if accepted is None else sum(accepted), "{}")
    if episodes:
        yield str(turns(trajectory.record["authorship_mask"]))


def _prompt(codec: TextCodec, trajectory: Trajectory, keep: str) -> str:
    return visible(codec.decode(trajectory.record["prompt_token_ids"]), keep)


def _response(
    codec: TextCodec, trajectory: Trajectory, *, gap: bool, drafts: bool, keep: str
) -> Text:
    record = trajectory.record
    gaps = trajectory.gaps if gap else [None] * len(record["authorship_mask"])
    notes = ["" if g is None or abs(g) < NOTABLE_GAP else f"{{{g:+.1f}}}" for g in gaps]
    texts = codec.token_texts(record["response_token_ids"])
    marked = trajectory.accepted_drafts if drafts else None
    return authored_text(
        texts, record["authorship_mask"], notes, keep, marked or itertools.repeat(0)
    )
