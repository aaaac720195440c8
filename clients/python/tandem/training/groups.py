"""The groups of a step: prompts, their responses, and the rewards of the responses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.data.dataset import Example
from tandem.environments.episode import Episode
from tandem.environments.run_environment import trajectories_of
from tandem.metrics import StepClock, response_metrics
from tandem.rewards.judges.cases import Outcome
from tandem.rewards.judges.responses import Response
from tandem.rewards.reward import Judged, overlong_punishment
from tandem.rpc.images import VisionInput
from tandem.rpc.requests import Prompt
from tandem.rpc.seeds import prompt_seed
from tandem.run_directory.episodes import EpisodeRecord
from tandem.session.episodes import draw_episodes, episode_metrics, failures_without_response
from tandem.session.session import Session, WeightsRule
from tandem.settings.run import RunSettings

# Rewards of a group that differ by no more than this, times the largest of their magnitudes where
# that is above 1, are equal: sums of the same scores in another order differ by rounding. It is the
# rule of the trainer's estimators (kRewardTolerance of common/loss/advantages.h).
REWARD_TOLERANCE = 1e-9


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding."""
    if not rewards:
        return False
    least, most = min(rewards), max(rewards)
    return most - least > REWARD_TOLERANCE * max(1.0, abs(least), abs(most))


@dataclass(frozen=True)
class Group:
    """The responses to one prompt; lists hold one entry per response.

    Attributes:
        id: unique in the run.
        example: the row and its prompt.
        rewards: the weighted sum of the scores; None where a function failed.
        scores: by reward function what it gives; None where it failed.
        punishments: of responses that are too long, at most 0.
        images: those of its episodes, kept for the servers, which ask for their pixels.
    """

    id: str
    example: Example
    trajectories: Sequence[trajectory_pb2.Trajectory]
    texts: Sequence[str]
    rewards: Sequence[float | None]
    scores: Mapping[str, Sequence[float | None]]
    punishments: Sequence[float]
    images: Sequence[VisionInput] = ()

    @property
    def varies(self) -> bool:
        """Whether two responses have different rewards, their punishments left aside."""
        return rewards_differ([reward for reward in self.rewards if reward is not None])

    @property
    def shaped_rewards(self) -> list[float | None]:
        """The sums of reward and punishment, which the responses are trained on."""
        return [
            None if reward is None else reward + punishment
            for reward, punishment in zip(self.rewards, self.punishments, strict=True)
        ]


@dataclass(frozen=True)
class Drawn:
    """The groups that were drawn for a step.

    Attributes:
        groups: all groups, in the order of the data.
        kept: the groups to train on.
        failures: a message for every call of a reward function that failed.
        num_gen_batches: number of times that prompts were drawn.
        timed_out: number of responses for which a reward function took too long.
        episode_metrics: those of the step's episodes, where the run has an environment.
    """

    groups: list[Group]
    kept: list[Group]
    failures: list[str]
    num_gen_batches: int
    timed_out: int = 0
    episode_metrics: Mapping[str, float | int] = field(default_factory=dict)

    @property
    def all_failed(self) -> bool:
        """Whether no response has a reward."""
        return all(reward is None for group in self.groups for reward in group.rewards)

    def metrics(self) -> dict[str, float | int]:
        """Returns the client's metrics of the step; those of rewards if any response has one."""
        known = [
            (reward, punishment)
            for group in self.groups
            for reward, punishment in zip(group.rewards, group.punishments, strict=True)
            if reward is not None
        ]
        means: dict[str, float] = {}
        if known:
            rewards, punishments = zip(*known, strict=True)
            means = {
                "reward/task_mean": sum(rewards) / len(rewards),
                **self._score_means(),
                "reward/overlong_mean": sum(punishments) / len(punishments),
            }
        return {
            **response_metrics(
                [group.trajectories for group in self.groups],
                [group.shaped_rewards for group in self.groups],
            ),
            "reward/timed_out": self.timed_out,
            **means,
            **self.episode_metrics,
            "batch/groups_drawn": len(self.groups),
            "batch/groups_dropped": len(self.groups) - len(self.kept),
            "batch/num_gen_batches": self.num_gen_batches,
        }

    def _score_means(self) -> dict[str, float]:
        """Returns the mean of each of several reward functions; of one it is reward/task_mean."""
        names = list(self.groups[0].scores)
        means = {}
        for name in names if len(names) > 1 else ():
            scores = [value for group in self.groups for value in group.scores[name]]
            known = [value for value in scores if value is not None]
            if known:
                means[f"reward/{name}"] = sum(known) / len(known)
        return means


def draw_groups(
    session: Session,
    step: int,
    first: int,
    weights: server_pb2.WeightsVersion,
    clock: StepClock,
    run_dir: Path = Path(),
) -> Drawn:
    """Draws the groups of a step: the data's prompts from place `first` on, and their responses.

    With `batch.filter_groups` groups whose rewards are all the same are dropped, and as many
    further prompts are drawn, until the step is full or has its last generation batch: the dynamic
    sampling of DAPO (arXiv 2503.14476). The groups are a function of seed, step, `first` and
    weights alone, and of what an environment said, which is recorded in `run_dir`.

    Raises what Session.generate() and Reward raise.
    """
    settings = session.settings
    wanted, filtering = settings.batch.prompts_per_step, settings.batch.filter_groups
    rule = _weights_rule(settings)
    groups: list[Group] = []
    kept: list[Group] = []
    failures: list[str] = []
    episodes: list[Episode] = []
    batches = timed_out = 0
    while len(kept) < wanted and batches < (filtering.max_num_gen_batches if filtering else 1):
        examples = session.data.batch(first + len(groups), wanted - len(kept))
        begin = len(groups)
        judging = _JudgingBehind(session, step, examples)
        with clock.phase("generate"):
            prompts = [
                step_prompt(session, example, step, begin + i) for i, example in enumerate(examples)
            ]
            if session.environment is None:
                answers = session.generate(
                    prompts,
                    weights,
                    rule=rule,
                    on_answer=judging.add,
                    progress=clock.progress,
                )
                shown: list[list[VisionInput]] = [[] for _ in examples]
            else:
                requests = {
                    begin + i: pair for i, pair in enumerate(zip(prompts, examples, strict=True))
                }
                on_group = partial(_judge_episodes, judging, begin)
                with EpisodeRecord(run_dir, step) as record:
                    drawn = draw_episodes(
                        session,
                        step,
                        requests,
                        weights,
                        record,
                        on_group,
                        rule=rule,
                    )
                answers = [trajectories_of(group) for group in drawn]
                shown = [[image for one in group for image in one.images] for group in drawn]
                episodes += itertools.chain(*drawn)
        with clock.phase("reward"):
            texts, judged = judging.result()
        groups += [
            Group(
                f"step-{step}/prompt-{begin + i}",
                examples[i],
                trajectories,
                texts[i],
                judged.rewards[i],
                {name: scores[i] for name, scores in judged.scores.items()},
                [_punishment(session, trajectory) for trajectory in trajectories],
                shown[i],
            )
            for i, trajectories in enumerate(answers)
        ]
        kept = [group for group in groups if group.varies or not filtering]
        failures += judged.failures
        timed_out += judged.timed_out
        batches += 1
    failures += failures_without_response(episodes)
    metrics = episode_metrics(episodes) if episodes else {}
    return Drawn(groups, kept, failures, batches, timed_out, metrics)


def _weights_rule(settings: RunSettings) -> WeightsRule:
    """Returns the weights that may draw the samples of a run."""
    if settings.async_.max_staleness:
        return WeightsRule.PINNED
    return WeightsRule.ANY_SINCE if settings.objective.max_staleness else WeightsRule.CURRENT


def _judge_episodes(
    judging: _JudgingBehind, begin: int, index: int, episodes: Sequence[Episode]
) -> None:
    """Lets the responses of a prompt's episodes be judged; those whose reset() failed have none."""
    whole = [one for one in episodes if one.trajectory is not None]
    judging.add(index - begin, trajectories_of(whole), [one.reward for one in whole])


class _JudgingBehind:
    """Judges the responses to the prompts of a generation batch while others are drawn."""

    def __init__(self, session: Session, step: int, examples: Sequence[Example]) -> None:
        self._session = session
        self._step = step
        self._examples = examples
        self._judging = session.reward.judging()
        self._texts: dict[int, list[str]] = {}
        self._groups: SimpleQueue[
            tuple[int, Sequence[trajectory_pb2.Trajectory], Sequence[Outcome | None]] | None
        ]
        self._groups = SimpleQueue()
        self._error: Exception | None = None
        # A generation that fails ends the run, and leaves the thread to itself.
        self._thread = Thread(target=self._work, name="judge-behind", daemon=True)
        self._thread.start()

    def add(
        self,
        index: int,
        group: Sequence[trajectory_pb2.Trajectory],
        environment: Sequence[Outcome | None] = (),
    ) -> None:
        """Takes the responses to a prompt, and what their environments gave; returns at once."""
        self._groups.put((index, group, environment or [None] * len(group)))

    def result(self) -> tuple[list[list[str]], Judged]:
        """Returns the texts and the rewards of all responses, by prompt, once they are judged.

        Raises what Judging.result() raises.
        """
        self._groups.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        texts = [self._texts[index] for index in range(len(self._examples))]
        return texts, self._judging.result()

    def _work(self) -> None:
        try:
            while (entry := self._groups.get()) is not None:
                index, group, environment = entry
                decode = self._session.codec.decode
                texts = self._texts[index] = [decode(one.response_token_ids) for one in group]
                responses = [
                    Response(text, one, self._step, environment=gave)
                    for text, one, gave in zip(texts, group, environment, strict=True)
                ]
                self._judging.add(index, self._examples[index], responses)
        except Exception as error:
            self._error = error


def step_prompt(session: Session, example: Example, step: int, index: int) -> Prompt:
    """Returns the request for one prompt of a step."""
    settings = session.settings
    return Prompt(
        token_ids=example.token_ids,
        seed=prompt_seed(settings.seed, step, index),
        num_samples=settings.batch.samples_per_prompt,
        sampling=session.sampling,
        tandem=settings.tandem.given(),
        return_other_logprobs=settings.return_other_logprobs,
        return_routed_experts=bool(settings.objective.routing_replay),
        speculative=settings.speculative.fields(),
        vision_inputs=example.vision_inputs,
    )


def _punishment(session: Session, trajectory: trajectory_pb2.Trajectory) -> float:
    buffer = session.settings.reward.overlong_buffer
    if buffer is None:
        return 0.0
    length = len(trajectory.response_token_ids)
    return overlong_punishment(length, session.settings.sampling.max_tokens, buffer)
