"""The groups of a step: prompts, their responses, and the rewards of the responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.data import Example
from tandem.judges.cases import Response
from tandem.metrics import StepClock, response_metrics
from tandem.requests import Prompt
from tandem.rewards import overlong_punishment
from tandem.schedule import prompt_seed
from tandem.session import Session
from tandem.settings import given
from tandem.types.v1 import server_pb2, trajectory_pb2


@dataclass(frozen=True)
class Group:
    """The responses to one prompt; lists hold one entry per response.

    Attributes:
        id: unique in the run.
        example: the row and its prompt.
        rewards: the weighted sum of the scores; None where a function failed.
        scores: by reward function what it gives; None where it failed.
        punishments: of responses that are too long, at most 0.
    """

    id: str
    example: Example
    trajectories: Sequence[trajectory_pb2.Trajectory]
    texts: Sequence[str]
    rewards: Sequence[float | None]
    scores: Mapping[str, Sequence[float | None]]
    punishments: Sequence[float]

    @property
    def varies(self) -> bool:
        """Whether two responses have different rewards, their punishments left aside."""
        return len({reward for reward in self.rewards if reward is not None}) > 1

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
    """

    groups: list[Group]
    kept: list[Group]
    failures: list[str]
    num_gen_batches: int
    timed_out: int = 0

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
) -> Drawn:
    """Draws the groups of a step: the data's prompts from place `first` on, and their responses.

    With `batch.filter_groups` groups whose rewards are all the same are dropped, and as many
    further prompts are drawn, until the step is full or has its last generation batch: the dynamic
    sampling of DAPO (arXiv 2503.14476). The groups are a function of seed, step, `first` and
    weights alone.

    Raises what Session.generate() and Reward raise.
    """
    settings = session.settings
    wanted, filtering = settings.batch.prompts_per_step, settings.batch.filter_groups
    groups: list[Group] = []
    kept: list[Group] = []
    failures: list[str] = []
    batches = timed_out = 0
    while len(kept) < wanted and batches < (filtering.max_num_gen_batches if filtering else 1):
        examples = session.data.batch(first + len(groups), wanted - len(kept))
        begin = len(groups)
        with clock.phase("generate"):
            answers = session.generate(
                [
                    step_prompt(session, example, step, begin + i)
                    for i, example in enumerate(examples)
                ],
                weights,
                any_version=bool(settings.objective.max_staleness),
            )
        with clock.phase("reward"):
            texts = [[session.codec.decode(t.response_token_ids) for t in g] for g in answers]
            responses = [
                [Response.of(*one, step) for one in zip(group, said, strict=True)]
                for group, said in zip(answers, texts, strict=True)
            ]
            judged = session.reward(examples, responses)
        groups += [
            Group(
                f"step-{step}/prompt-{begin + i}",
                examples[i],
                trajectories,
                texts[i],
                judged.rewards[i],
                {name: scores[i] for name, scores in judged.scores.items()},
                [_punishment(session, trajectory) for trajectory in trajectories],
            )
            for i, trajectories in enumerate(answers)
        ]
        kept = [group for group in groups if group.varies or not filtering]
        failures += judged.failures
        timed_out += judged.timed_out
        batches += 1
    return Drawn(groups, kept, failures, batches, timed_out)


def step_prompt(session: Session, example: Example, step: int, index: int) -> Prompt:
    """Returns the request for one prompt of a step."""
    settings = session.settings
    return Prompt(
        token_ids=example.token_ids,
        seed=prompt_seed(settings.seed, step, index),
        num_samples=settings.batch.samples_per_prompt,
        sampling=session.sampling,
        tandem=given(settings.tandem),
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
