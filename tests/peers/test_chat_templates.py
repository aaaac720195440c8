"""The chat templates that Hugging Face TRL ships: which are continued turn by turn, and which not.

A run takes those whose calls have a known format; the others need `environment.tool_calls`, or are
refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import trl
from talking import write_chat_tokenizer
from tandem.environments.template import Turns
from tandem.environments.tool_calls import PARSERS, ToolCall, format_of
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
# A template for training has the row of the one that it is made from, unless it has its own.
ROWS = {
    # Continued, with the format of the calls.
    **dict.fromkeys(["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"], "hermes"),
    **dict.fromkeys(["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"], "qwen_xml"),
    **dict.fromkeys([f"nemotron_3_{one}" for one in ("nano", "super", "ultra")], "qwen_xml"),
    "nemotron_3_5_lightning": "qwen_xml",
    **dict.fromkeys(["llama3_1", "llama3_2"], "llama3"),
    # Continued, but the template names no format of calls that is known.
    **dict.fromkeys(["llama3", "gptoss", "muse_glimmer", "qwen2_5_vl"], None),
    **dict.fromkeys(["lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"], None),
    **dict.fromkeys(["gemma4_v2", "glm4moe_training"], None),
    # Refused, and why.
    "glm4moe": "no special token ends a turn",
    "deepseekv3": 'can only concatenate str (not "dict") to str',
    "deepseekv3_training": "a prompt is rendered otherwise",
    "deepseek_r1_distill": "a prompt is rendered otherwise",
    "diffusion_gemma": "a turn of the model is rendered otherwise",
    "gemma4": "a turn of the model is rendered otherwise",
    **dict.fromkeys(["gemma4_v3", "gemma4_v4", "gemma4_v5"], "a turn of the model is rendered"),
    **dict.fromkeys(["phi3", "phi3_5"], "a turn of the model is rendered otherwise"),
    **dict.fromkeys(["cohere", "cohere2", "gemma", "gemma3"], "Conversation roles must alternate"),
    **dict.fromkeys(["idefics3", "smolvlm"], "does not show messages of the role `tool`"),
    "llava_next": "has no attribute 'text'",
}
# Those that are continued when the model thinks in every turn.
THINKS = ["qwen3", *(name for name in NAMES if name.startswith("nemotron_3"))]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "Where."}},
                "required": ["x"],
            },
        },
    }
]


def row(name):
    """The row of a template."""
    return ROWS[name] if name in ROWS else ROWS[name.removesuffix("_training")]


CONTINUED = [name for name in NAMES if row(name) is None or row(name) in PARSERS]


def codec_of(name, folder):
    """A tokenizer with the special tokens that a template writes."""
    template = (FOLDER / f"{name}.jinja").read_text()
    special = re.findall(r"<\|[\w.]+\|?>|<[\w.]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>", template)
    write_chat_tokenizer(folder, template, sorted({*special, "<|end|>"}))
    named = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return TextCodec(folder)


def conversation(name):
    """Three turns of the model; the last one calls nothing."""
    thought = "<think>\nthought\n</think>\n\n" if name in THINKS else ""
    messages = [{"role": "user", "content": "Where?"}]
    for number, answer in ((1, "a wall"), (2, "une clé")):
        function = {"name": "look", "arguments": {"x": number}}
        call = {"id": f"call0000{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": f"{thought}Look {number}.", "tool_calls": [call]},
            {"role": "tool", "name": "look", "content": answer, "tool_call_id": call["id"]},
        ]
    return messages


@pytest.mark.parametrize("name", NAMES)
def test_a_template_of_trl_is_taken_or_refused_as_its_row_says(name, tmp_path):
    codec, expected = codec_of(name, tmp_path), row(name)
    if expected in PARSERS:
        assert format_of(codec.chat_template) == expected
    else:
        with pytest.raises(ConfigError, match=r"^environment\.tool_calls: "):
            format_of(codec.chat_template)
    if name in CONTINUED:
        Turns(codec, {"tools": TOOLS})
    else:
        with pytest.raises(ConfigError) as error:
            Turns(codec, {"tools": TOOLS})
        assert "cannot be continued turn by turn" in error.value.message
        assert expected in error.value.message


@pytest.mark.parametrize("name", CONTINUED)
def test_turns_with_what_is_between_them_are_the_whole_rendering(name, tmp_path):
    codec = codec_of(name, tmp_path)
    turns, kwargs = Turns(codec, {"tools": TOOLS}), {"tools": TOOLS}
    messages = conversation(name)
    ids = codec.chat(messages[:1], kwargs)
    [end] = codec.token_texts([turns.end_id])
    for place in (1, 3):
        before = codec.rendered(messages[:place], kwargs, prompt=True)
        turn = codec.rendered(messages[: place + 1], kwargs, prompt=False).removeprefix(before)
        # The text of a model, up to the token that ends its turn.
        ids += codec.encode(turn[: turn.rindex(end) + len(end)], special=False)
        call = ToolCall("look", {"x": place}, messages[place]["tool_calls"][0]["id"])
        ids += turns.between([(call, messages[place + 1]["content"])])
    assert ids == codec.chat(messages, kwargs)
