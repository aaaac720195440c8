"""A small model that talks with tools: its words, its chat template and its weights.

make.py of this folder, and of calculator, grid_world and tic_tac_toe beside it, use it. The model
knows a few dozen words, and calls a tool as Qwen and Hermes do, with spaces between the words:

    <tool_call> {"name": "guess", "arguments": {"number": 5 }} </tool_call>
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
WORDS = ("system", "user", "assistant", "tools", ":", "<tool_call>", "</tool_call>", "}}")
# A tool's answer is a message of the user's.
TEMPLATE = (
    "{% if tools %}<|im_start|> system tools :"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %} <|im_end|> {% endif %}"
    "{% for m in messages %}<|im_start|> {{ 'user' if m.role == 'tool' else m.role }} "
    "{{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def call(tool: str, **arguments: int | str) -> str:
    """Returns the text of a call."""
    given = ", ".join(f'"{name}": {json.dumps(value)} ' for name, value in arguments.items())
    given = given.rstrip()
    return f'<tool_call> {{"name": "{tool}", "arguments": {{{given} }}}} </tool_call>'


def write_model(directory: Path, words: Iterable[str], seed: int, *, length: int) -> None:
    """Writes a Llama of 0.6 million parameters with random weights, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    every = dict.fromkeys([*SPECIAL, *WORDS, *words])
    vocabulary = {word: index for index, word in enumerate(every)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=length,
        eos_token_id=vocabulary["<|im_end|>"],
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def write_rows(
    file: Path,
    tokenizer: Path,
    tools: Sequence[Callable[..., Any]],
    conversations: Iterable[Sequence[Mapping[str, str]]],
) -> None:
    """Writes conversations as texts to learn whole, in the chat template."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import get_json_schema

    renderer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    schemas = [get_json_schema(tool) for tool in tools]
    texts = (
        renderer.apply_chat_template(list(one), tools=schemas, tokenize=False)
        for one in conversations
    )
    write_lines(file, ({"text": text.strip()} for text in texts))


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def turns(*texts: str) -> Iterator[dict[str, str]]:
    """Yields the messages of a conversation: the user, then model and tool by turns."""
    roles = ["user", *["assistant", "tool"] * len(texts)]
    for role, text in zip(roles, texts, strict=False):
        yield {"role": role, "content": text}


def folder_of(argument: Sequence[str]) -> Path:
    """Returns the folder that the command line names."""
    if len(argument) != 2:
        sys.exit(f"{argument[0]} FOLDER")
    return Path(argument[1])
