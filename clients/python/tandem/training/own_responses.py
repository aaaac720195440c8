"""The senior's own responses, the texts to learn of supervised training without answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.data.dataset import Example
from tandem.metrics import length_metrics
from tandem.models.tokenizer import TextCodec
from tandem.rpc.requests import Prompt, SupervisedSample
from tandem.rpc.seeds import prompt_seed
from tandem.run_directory.trajectories.record import Response
from tandem.session.session import Session


@dataclass(frozen=True)
class OwnResponses:
    """The responses of a step, one to each prompt.

    Attributes:
        step: the step that learns them.
        examples: the rows and their prompts.
        trajectories: the response to each of them.
    """

    step: int
    examples: Sequence[Example]
    trajectories: Sequence[trajectory_pb2.Trajectory]

    def samples(self) -> list[SupervisedSample]:
        """Returns the prompts and the responses to learn."""
        return [
            SupervisedSample(
                example.token_ids, trajectory.response_token_ids, example.vision_inputs
            )
            for example, trajectory in zip(self.examples, self.trajectories, strict=True)
        ]

    def metrics(self) -> dict[str, float | int]:
        """Returns the client's metrics of the step."""
        return length_metrics(self.trajectories)

    def responses(self, codec: TextCodec) -> Iterator[Response]:
        """Yields the responses as a run keeps them; nobody judges them."""
        for index, example in enumerate(self.examples):
            yield Response(
                self.trajectories[index],
                text=codec.decode(self.trajectories[index].response_token_ids),
                group_id=f"step-{self.step}/prompt-{index}",
                place=example.shown_place,
                row=example.shown_row,
            )


def draw_own_responses(
    session: Session,
    step: int,
    examples: Sequence[Example],
    weights: server_pb2.WeightsVersion,
) -> OwnResponses:
    """Draws one response of the senior alone to each prompt, by these weights of the trainer.

    The responses are a function of the seed, the step, the examples and the weights alone, unless
    `speculative` accepts drafts by rejection sampling.

    Raises what Session.generate() raises.
    """
    settings = session.settings
    prompts = [
        Prompt(
            token_ids=example.token_ids,
            seed=prompt_seed(settings.seed, step, index, "sft"),
            sampling=session.sampling,
            tandem={"enabled": False},
            speculative=settings.speculative.fields(),
            vision_inputs=example.vision_inputs,
        )
        for index, example in enumerate(examples)
    ]
    groups = session.generate(prompts, weights)
    return OwnResponses(step, examples, [group[0] for group in groups])
