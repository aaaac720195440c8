"""`tandem generate` and `tandem score`: responses, and log-probabilities of texts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.command_line import JsonFlag, command
from tandem.cli.commands.options import (
    AcceptanceRuleOption,
    RolloutAddress,
    SpeculativeOption,
    TokenizerOption,
)
from tandem.errors import ConfigError, RpcError
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.terminal.output import Output, ResponsePrinter

if TYPE_CHECKING:
    from tandem.models.tokenizer import TextCodec
    from tandem.rpc.client import RolloutClient
    from tandem.rpc.images import VisionInput
    from tandem.rpc.requests import Prompt

# The option for a field of the contract, where the two have different names.
_OPTIONS = {
    "selection_strategy": "strategy",
    "stop_token_ids": "stop",
    "enabled": "solo",
    "method": "speculative",
}


@command()
def generate(
    prompt: Annotated[list[str], typer.Argument(help="Prompts.")],
    rollout: RolloutAddress = None,
    tokenizer: TokenizerOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help="Variables of the chat template, as YAML: '{enable_thinking: false}'.",
            metavar="MAPPING",
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Show this image before each prompt, with --chat; may be repeated."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of response tokens.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature; 0: greedy. Default: the server's."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Probability mass of the likeliest tokens to draw from.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Number of likeliest tokens to draw from.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw only from tokens at least this likely, relative to the likeliest."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop at the token that completes this text; may be repeated."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of responses per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same responses.")] = 0,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Rule that chooses the author: bernoulli, chunk, alternating, sentence, word or "
            "turn. Default: the server's."
        ),
    ] = None,
    prob_senior: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Probability that the senior writes (strategies bernoulli and word).",
        ),
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a chunk (strategy chunk).")
    ] = None,
    solo: Annotated[bool, typer.Option("--solo", help="Let only the senior write.")] = False,
    speculative: SpeculativeOption = None,
    acceptance_rule: AcceptanceRuleOption = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print responses while they are written. Default: only on a terminal.",
        ),
    ] = None,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Let the senior and the junior answer prompts together."""
    from tandem.cluster.registry import connect
    from tandem.preflight.server_facts import RolloutFacts
    from tandem.rpc.client import RolloutClient
    from tandem.rpc.requests import Prompt
    from tandem.rpc.seeds import prompt_seed
    from tandem.run_directory.trajectories.record import Response, trajectory_record

    output = Output(as_json=as_json)
    if as_json and stream:
        raise ConfigError("--stream: --json prints whole records")
    if image and not chat:
        raise ConfigError("--image: needs --chat, whose template places the images")
    variables = _variables(chat_template_kwargs)
    if variables and not chat:
        raise ConfigError("--chat-template-kwargs: needs --chat")
    with (
        _named_by_option(),
        connect(RolloutClient, rollout, "--rollout", credentials) as client,
    ):
        codec = codec_of(client, tokenizer)
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            **codec.stops(stop or [], "--stop"),
        }
        tandem = {
            "enabled": not solo,
            "selection_strategy": strategy,
            "prob_senior": prob_senior,
            "chunk_size": chunk_size,
        }
        asked = [_asked(codec, text, chat, image or [], variables) for text in prompt]
        prompts = [
            Prompt(
                token_ids=ids,
                vision_inputs=images,
                seed=prompt_seed(seed, 0, index, "generate"),
                num_samples=samples,
                sampling=sampling,
                tandem=tandem,
                return_other_logprobs=as_json and not solo,
                speculative={"method": speculative, "acceptance_rule": acceptance_rule},
                stream_tokens=output.console.is_terminal if stream is None else stream,
                request_id=f"prompt-{index}",
            )
            for index, (ids, images) in enumerate(asked)
        ]
        # The junior reads the prompt to write, and to draft.
        reads = not solo or speculative == "junior"
        facts = RolloutFacts.of(client.address, client.info())
        _note_room(output, prompts, max_tokens, facts.longest_sequence(junior=reads))
        if not as_json:
            heads = {
                (f"prompt-{index}", sample): _head(text, sample, samples)
                for index, text in enumerate(prompt)
                for sample in range(samples)
            }
            client.generate(
                prompts, on_event=ResponsePrinter(output.console, codec, heads).on_event
            )
            return
        for index, group in enumerate(client.generate(prompts)):
            for trajectory in group:
                text = codec.decode(trajectory.response_token_ids)
                response = Response(trajectory, text, group_id=f"prompt-{index}")
                output.json_line(trajectory_record(response))


@command()
def score(
    text: Annotated[list[str], typer.Argument(help="Texts.")],
    rollout: RolloutAddress = None,
    tokenizer: TokenizerOption = None,
    senior: Annotated[bool, typer.Option(help="Score under the senior.")] = True,
    junior: Annotated[bool, typer.Option(help="Score under the junior.")] = True,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Divisor of the logits. Default: the server's."),
    ] = None,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Show log-probabilities of texts under senior and junior."""
    from tandem.cluster.registry import connect
    from tandem.rpc.client import RolloutClient
    from tandem.rpc.wire import from_tensor, short_floats

    output = Output(as_json=as_json)
    with connect(RolloutClient, rollout, "--rollout", credentials) as client:
        codec = codec_of(client, tokenizer)
        ids = [codec.encode(one) for one in text]
        if any(len(one) < 2 for one in ids):
            raise ConfigError("a text must have at least two tokens")
        reply = client.score(
            [(one, 1) for one in ids], senior=senior, junior=junior, temperature=temperature
        )
    rows = []
    for one, tokens, scores in zip(text, ids, reply.sequences, strict=True):
        row: dict[str, Any] = {"text": one, "token_ids": tokens}
        for name, asked in (("senior", senior), ("junior", junior)):
            if asked:
                logprobs = from_tensor(getattr(scores, f"{name}_logprobs"))
                row[f"{name}_logprobs"] = short_floats(logprobs)
                row[f"{name}_nats_per_token"] = float(-logprobs.mean())
        rows.append(row)
    shown = [
        {"text": row["text"], "tokens": len(row["token_ids"])}
        | {key: value for key, value in row.items() if key.endswith("_nats_per_token")}
        for row in rows
    ]
    output.result({"version": reply.weights.version, "scores": rows}, output.rows(shown))


def _asked(
    codec: TextCodec, text: str, chat: bool, images: Sequence[Path], variables: Mapping[str, Any]
) -> tuple[list[int], list[VisionInput]]:
    """Returns the ids of a prompt, and its images."""
    from tandem.rpc.images import content_of

    if not chat:
        ids, inputs = codec.encode(text), []
    else:
        messages = [{"role": "user", "content": content_of(images, text)}]
        ids, inputs = codec.chat_with_images(messages, template_kwargs=variables)
    if not ids:
        raise ConfigError(f"PROMPT: {text!r} has no tokens")
    return ids, inputs


def _variables(text: str | None) -> dict[str, Any]:
    """Returns the variables of the chat template that an option gives as YAML."""
    from tandem.settings.values import read_yaml

    try:
        variables = read_yaml(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs: not YAML: {error}") from None
    if not isinstance(variables, dict):
        raise ConfigError(
            "--chat-template-kwargs: must be a mapping, such as {enable_thinking: false}"
        )
    return variables


@contextmanager
def _named_by_option() -> Iterator[None]:
    """Names the option in an error about a field of a prompt."""
    try:
        yield
    except (ConfigError, RpcError) as error:
        match = re.search(
            r"\b(?:sampling|tandem|speculative)\.(\w+)\S*: (.*)", error.message, re.DOTALL
        )
        if match is None:
            raise
        field, problem = match.groups()
        option = "--" + _OPTIONS.get(field, field).replace("_", "-")
        raise ConfigError(f"{option}: {problem}", hint=error.hint) from None


def _note_room(
    output: Output, prompts: Sequence[Prompt], max_tokens: int, max_model_len: int
) -> None:
    """Warns, on the error stream, that the server cuts a response before `max_tokens`."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + max_tokens > max_model_len:
        output.error(
            f"warning: --max-tokens {max_tokens:,}: the server's max_model_len of "
            f"{max_model_len:,} leaves {max(0, max_model_len - longest):,} tokens after a prompt "
            f"of {longest:,}"
        )


def _head(prompt: str, sample: int, samples: int) -> str:
    """Returns the line above a response: its prompt, the start of it for one of several samples."""
    if samples == 1:
        return prompt
    start = textwrap.shorten(prompt, 48, placeholder=" …")
    return f"{start} (sample {sample + 1} of {samples})"


def codec_of(client: RolloutClient, directory: Path | None) -> TextCodec:
    """Returns the tokenizer of `directory`, else of the server's model if its directory is here."""
    from tandem.models.tokenizer import TextCodec

    if directory is not None:
        return TextCodec(directory)
    served = Path(client.info().server.model.path)
    if not served.is_dir():
        raise ConfigError(
            f"--tokenizer: the server's model directory {served} is not on this machine",
            hint="--tokenizer DIR names a directory here with the same tokenizer.json",
        )
    return TextCodec(served)
