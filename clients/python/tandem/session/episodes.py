"""Episodes, drawn in the place of single responses where a run has an environment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tandem._proto.types.v1 import server_pb2
from tandem.data.dataset import Example
from tandem.environments.episode import Episode, StopReason, Takeover
from tandem.rewards.judges.cases import Failure, FailureKind
from tandem.rpc.requests import Prompt
from tandem.rpc.seeds import prompt_seed
from tandem.run_directory.episodes import EpisodeKey, EpisodeRecord, NoRecord
from tandem.session.session import Session, WeightsRule
from tandem.utils.authors import ENVIRONMENT
from tandem.utils.progress import Progress

# Keys of the failures of environments that have a cause of their own.
_FAILURES = {
    "timeouts": FailureKind.TIMEOUT,
    "crashes": FailureKind.CRASH,
    "floods": FailureKind.FLOOD,
}
# Takes the index of a prompt, and its episodes.
OnGroup = Callable[[int, Sequence[Episode]], None]


def draw_episodes(
    session: Session,
    step: int,
    requests: Mapping[int, tuple[Prompt, Example]],
    weights: server_pb2.WeightsVersion,
    record: EpisodeRecord | NoRecord,
    on_group: OnGroup = lambda index, episodes: None,
    *,
    takeovers: Mapping[EpisodeKey, Takeover] | None = None,
    rule: WeightsRule = WeightsRule.CURRENT,
) -> list[list[Episode]]:
    """Draws the episodes of prompts, in the order of `requests`.

    `requests` has by the index in the step the request of a first turn and the example. What
    environments say is added to `record`, or comes from there. `on_group` is called as soon as all
    episodes of a prompt have ended. Step 0 stands for evaluations.

    `takeovers` has the episodes in which another model takes over.

    Raises what Session.generate() raises, and StopRequested.
    """
    environment = session.environment
    assert environment is not None
    rules = environment.rules(session.longest_sequence)
    drawn: dict[int, dict[int, Episode]] = defaultdict(dict)

    def on_end(episode: Episode) -> None:
        index, sample = episode.key
        group = drawn[index]
        group[sample] = episode
        if len(group) == len(requests[index][0].sample_indices):
            on_group(index, [group[one] for one in sorted(group)])

    episodes = [
        Episode(
            (index, sample),
            example,
            request,
            # One for all samples of a prompt, which are compared with each other.
            prompt_seed(session.settings.seed, step, index, "environment"),
            rules,
            (takeovers or {}).get((index, sample)),
        )
        for index, (request, example) in requests.items()
        for sample in request.sample_indices
    ]
    generate = partial(
        session.generate,
        expected=weights,
        rule=rule,
        # The run is told of episodes, not of turns.
        progress=Progress(),
    )
    environment.draw(
        episodes, record, lambda prompts, on_answer: generate(prompts, on_answer=on_answer), on_end
    )
    return [[drawn[index][one] for one in sorted(drawn[index])] for index in requests]


def failures_without_response(episodes: Sequence[Episode]) -> list[str]:
    """Returns a message for each episode that has no response, because its reset() failed."""
    return [
        f"environment: {one.reward.what}\n  row: {one.example.place}\n{one.reward.trace}".rstrip()
        for one in episodes
        if one.trajectory is None and isinstance(one.reward, Failure)
    ]


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float | int]:
    """Returns the metrics of a step's episodes, at least one."""
    stops = [one.stop for one in episodes]
    kinds = [one.failure_kind for one in episodes]
    said = [
        0 if one.trajectory is None else one.trajectory.authorship_mask.count(ENVIRONMENT)
        for one in episodes
    ]
    return {
        "environment/turns_mean": sum(one.turns for one in episodes) / len(episodes),
        "environment/tokens_mean": sum(said) / len(episodes),
        "environment/tool_calls_mean": sum(one.tool_calls for one in episodes) / len(episodes),
        "environment/tool_errors": sum(one.tool_errors for one in episodes),
        "environment/parse_errors": sum(one.parse_errors for one in episodes),
        "environment/failures": sum(one.failed for one in episodes),
        **{f"environment/{key}": kinds.count(kind) for key, kind in _FAILURES.items()},
        **{f"environment/stop_{reason}": stops.count(reason) for reason in StopReason},
    }
