"""A tokenizer that writes conversations, and fake models that write given texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import fakes

from tandem.models.tokenizer import TextCodec

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>", "<|eot_id|>"]
# Qwen's way: a tool's answer is a user's message.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    '<tool_call>{"name": …}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def image_template(pad: str) -> str:
    """Returns TEMPLATE for contents of parts too, with `pad` in the place of an image."""
    return TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}" + pad + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}",
    )


def write_chat_tokenizer(
    directory: Path, template: str = TEMPLATE, special: Sequence[str] = SPECIAL
) -> Path:
    """Writes a tokenizer of bytes and `special` tokens, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in special])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (directory / "chat_template.jinja").write_text(template)
    return directory


def chat_codec(directory: Path, template: str = TEMPLATE) -> TextCodec:
    """The codec of such a tokenizer."""
    return TextCodec(write_chat_tokenizer(directory, template))


def called(name: str, **arguments) -> str:
    """The text of a call, as Qwen writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def let_write(world: fakes.FakeWorld, codec: TextCodec, write) -> None:
    """Lets the fake models write the texts that `write` gives, each a turn.

    It gets the seed, the sample, and the text of the response so far.
    """

    def sample(prompt, index, version):
        before = "".join(codec.token_texts(list(prompt.response.token_ids)))
        text = write(prompt.seed, index, before)
        tokens = codec.encode(f"{text}<|im_end|>", special=False)
        cut = tokens[: prompt.sampling.max_tokens]
        turn = fakes.written(prompt, index, version, cut)
        turn.finish_reason = 1 if cut == tokens else 2
        return turn

    world.sample = sample
