"""Solo evaluation in episodes: only the senior writes, in the run's environment."""

from __future__ import annotations

import itertools

from tandem._proto.types.v1 import server_pb2
from tandem.environments.run_environment import trajectories_of
from tandem.errors import RewardError
from tandem.evaluation.answers import SENIOR_ALONE, Evaluation, grade, held_out, prompts_of
from tandem.run_directory.episodes import NoRecord
from tandem.session.episodes import draw_episodes, episode_metrics, failures_without_response
from tandem.session.session import Session


def solo_episodes(session: Session, weights: server_pb2.WeightsVersion) -> Evaluation:
    """Measures accuracy and pass@k of the senior's solo episodes with the held-out rows.

    Raises RewardError if no episode could begin.
    """
    requests = dict(
        enumerate(zip(prompts_of(session, SENIOR_ALONE), held_out(session), strict=True))
    )
    drawn = draw_episodes(session, 0, requests, weights, NoRecord())
    episodes = list(itertools.chain(*drawn))
    answers = [trajectories_of(group) for group in drawn]
    if not any(answers):
        raise RewardError(
            f"no episode of the evaluation began\n{failures_without_response(episodes)[0]}"
        )
    gave = [[one.reward for one in group if one.trajectory is not None] for group in drawn]
    return Evaluation(
        "solo", answers, grade(session, answers, environments=gave), episode_metrics(episodes)
    )
