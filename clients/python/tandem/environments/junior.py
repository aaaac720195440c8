"""The function by which an environment asks the frozen junior, for an opponent's move for example.

What the junior answers is no part of the response: only what the environment says of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tandem._proto.types.v1 import trajectory_pb2
from tandem.environments.calls import awaited
from tandem.environments.episode import Episode
from tandem.errors import ConfigError, EnvironmentFailedError
from tandem.rpc.requests import JUNIOR_ALONE, Prompt
from tandem.rpc.seeds import prompt_seed

Answer = Future[trajectory_pb2.Trajectory]


class AskedJunior:
    """The junior, as one episode's environment asks it: a function of messages.

    Its answers follow from the episode's seed, the number of the question, and the messages.
    """

    def __init__(self, episode: Episode, ask: Callable[[Prompt], Answer]) -> None:
        """`ask` sends a prompt; any thread may call it."""
        self._episode = episode
        self._ask = ask
        self._asked = 0

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> str:
        """Returns the junior's answer to a conversation, without the token that ends it.

        The chat template writes the conversation as it writes the run's prompts, the tools among
        them. By default the answer is sampled as a turn of the run.

        Raises EnvironmentFailedError for messages that the template refuses, or that fill the
        servers' max_model_len.
        """
        rules, request = self._episode.rules, self._episode.request
        number, self._asked = self._asked, self._asked + 1
        try:
            ids = rules.codec.chat(list(messages), rules.template_kwargs)
        except ConfigError as error:
            raise EnvironmentFailedError(f"junior: {error.message}") from error
        room = rules.longest - len(ids)
        if room < 1:
            raise EnvironmentFailedError(
                f"junior: the messages have {len(ids):,} tokens, but the servers' max_model_len is "
                f"{rules.longest:,}"
            )
        sampling = dict(request.sampling)
        if temperature is not None:
            sampling["temperature"] = temperature
        sampling["max_tokens"] = min(room, max_tokens or sampling["max_tokens"])
        stops = {*sampling.get("stop_token_ids", ()), rules.turns.end_id}
        prompt = Prompt(
            token_ids=ids,
            seed=prompt_seed(self._episode.seed, 0, number, "junior"),
            sampling=sampling | {"stop_token_ids": sorted(stops)},
            tandem=JUNIOR_ALONE,
        )
        written = list(awaited(self._ask(prompt)).response_token_ids)
        if written[-1] == rules.turns.end_id:
            written.pop()
        return "".join(rules.codec.token_texts(written))
