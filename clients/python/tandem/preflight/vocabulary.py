"""Whether the tokenizer of a run is that of its models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem._proto.types.v1 import server_pb2
from tandem.data.dataset import Dataset
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec
from tandem.preflight.inputs import Inputs
from tandem.preflight.problems import Problems


def check_vocabulary(codec: TextCodec, model: server_pb2.ModelInfo, whose: str) -> None:
    """Raises ConfigError unless `codec` is the tokenizer of the model of the server `whose`."""
    if model.vocabulary_digest:
        same = model.vocabulary_digest == codec.vocabulary_digest
    else:  # without a tokenizer.json the model may have more rows than this one has tokens
        same = codec.vocabulary_size <= model.num_token_ids
    if not same:
        raise other_tokenizer(codec, f"{whose} ({model.path})", f"{model.num_token_ids:,}")


def check_prompt_ids(
    codec: TextCodec, data: Mapping[str, Dataset], model: server_pb2.ModelInfo, whose: str
) -> None:
    """Raises ConfigError for a prompt with a token that has no embedding in the server's model.

    A tokenizer may have more ids than its model has embeddings, as that of Gemma 3 has.
    """
    if codec.vocabulary_size <= model.num_token_ids:
        return
    for field, dataset in data.items():
        for example in dataset.examples:
            highest = max(example.token_ids, default=0)
            if highest < model.num_token_ids:
                continue
            [text] = codec.token_texts([highest])
            raise ConfigError(
                f"{field}: {example.place}: the prompt has the token {text!r} ({highest}), but "
                f"{whose} only has embeddings for ids below {model.num_token_ids:,}",
                hint="the tokenizer has more ids than the model: remove the token from the row",
            )


def other_tokenizer(codec: TextCodec, whose: str, size: str) -> ConfigError:
    """Returns the error for a model that has another tokenizer than `codec`."""
    return ConfigError(
        f"tokenizer: {codec.directory} has {codec.vocabulary_size:,} tokens and is not the "
        f"tokenizer of {whose}, whose vocabulary has {size}",
        hint="all models of a run share one tokenizer, and `tokenizer` names its directory",
    )


def warn_of_end_token(
    inputs: Inputs, ending: Iterable[int], whose: str, problems: Problems
) -> None:
    """Warns if the tokenizer's end-of-sequence token ends no response, and the run needs it.

    `ending` has the ids that end the responses of the server or model `whose`, beside those that
    the run stops at.
    """
    if inputs.codec is None or inputs.sampling is None:
        return  # The tokenizer, or a stop text, is refused.
    if inputs.purpose == "reward-model":
        return  # Nothing writes responses.
    settings, learns, token = inputs.settings, inputs.learns_rows, inputs.codec.eos_token_id
    section = settings.dpo if inputs.purpose == "dpo" else settings.sft
    ignored = not section.append_eos if learns else settings.sampling.ignore_eos
    ends = {*ending, *(() if learns else inputs.sampling.get("stop_token_ids", ()))}
    if token is None or token in ends or ignored:
        return
    teaches = f"`tandem {inputs.purpose}` teaches it"
    does = teaches if learns else "a model that writes it continues"
    listed = ", ".join(map(str, sorted(ends)))
    problems.warn(
        f"the tokenizer's end-of-sequence token {inputs.codec.token_texts([token])[0]!r} (id "
        f"{token}) does not end responses of {whose}: {does}, and responses end at "
        f"{f'the ids {listed}' if listed else 'no token'}; `eos_token_id` in the model's "
        "generation_config.json lists them"
    )
