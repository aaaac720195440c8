"""The tokens of the chat template between two turns."""

import pytest
from talking import SPECIAL, TEMPLATE, chat_codec

from tandem.environments.template import Turns
from tandem.environments.tool_calls import ToolCall
from tandem.errors import ConfigError

LOOK = ToolCall("look", {"x": 1})
# It raises for other ids than Mistral's own, as Mistral's does.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[RESULTS] {{ m.tool_call_id }}: {{ m.content }} [/RESULTS]"
    "{% else %}{% if m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list"
    " | tojson }}{% else %}{{ m.content }}{% endif %}<|end|>{% endif %}{% endfor %}"
)


def test_the_text_between_two_turns_is_the_difference_of_two_renderings(tmp_path):
    codec = chat_codec(tmp_path)
    turns = Turns(codec, {})
    assert turns.end_id == codec.special_token_id("<|im_end|>")
    said = turns.between([(LOOK, "a wall"), (LOOK, "é")])
    assert "".join(codec.token_texts(said)) == (
        "\n<|im_start|>user\n<tool_response>a wall</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>é</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_turns_with_what_is_between_them_are_the_whole_conversation(tmp_path):
    codec = chat_codec(tmp_path)
    asked = [{"role": "user", "content": "go"}]
    wrote = {"role": "assistant", "content": "I look."}
    answer = {"role": "tool", "name": "look", "content": "a wall", "tool_call_id": "1"}
    turn = codec.encode("I look.<|im_end|>", special=False)
    ids = [*codec.chat(asked), *turn, *Turns(codec, {}).between([(LOOK, "a wall")])]
    assert ids == codec.chat([*asked, wrote, answer])


def test_ids_of_calls_reach_a_template_that_wants_them(tmp_path):
    codec = chat_codec(tmp_path, MISTRAL)
    turns = Turns(codec, {})
    assert turns.end_id == SPECIAL.index("<|end|>") + 256
    said = turns.between([(ToolCall("look", {}, "abcdefghi"), "a wall")])
    assert codec.decode(said) == "[RESULTS] abcdefghi: a wall [/RESULTS]"


@pytest.mark.parametrize("written", ["", "1", "abcdefghij", "abcdefgh\n", "abcdéfghi"])
def test_an_id_that_a_template_would_refuse_does_not_reach_it(tmp_path, written):
    codec = chat_codec(tmp_path, MISTRAL)
    said = Turns(codec, {}).between([(ToolCall("look", {}, written), "a wall")])
    assert codec.decode(said) == "[RESULTS] call00000: a wall [/RESULTS]"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        # Earlier turns lose what the last one shows.
        (
            TEMPLATE.replace(
                "{{ m.content }}{% for",
                "{% if loop.last and m.role == 'assistant' %}…{% endif %}{{ m.content }}{% for",
            ),
            "a turn of the model is rendered otherwise once more messages follow",
        ),
        (TEMPLATE.replace("<|im_end|>", "."), "no special token ends a turn"),
        # Gemma's.
        (
            "{% for m in messages %}{% if m.role == 'tool' %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<|end|>"
            "{% endfor %}",
            "turn by turn: .* roles must alternate",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|end|>{% endfor %}",
            "does not show messages of the role `tool`",
        ),
        (
            "{% if add_generation_prompt %}{{ messages | length }}{% endif %}" + TEMPLATE,
            "a prompt is rendered otherwise",
        ),
        # The first answer has a headline.
        (
            TEMPLATE.replace("<tool_response>", "{% if loop.index < 4 %}Said:{% endif %}"),
            "an answer to a second turn is rendered otherwise",
        ),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(tmp_path, template, why):
    tools = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    with pytest.raises(ConfigError, match=why) as error:
        Turns(chat_codec(tmp_path, template), tools)
    assert str(tmp_path) in error.value.message


def test_a_conversation_without_tools_goes_on_with_the_users_messages(tmp_path):
    plain = (
        "{% for m in messages if m.role != 'tool' %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    codec = chat_codec(tmp_path, plain)
    said = Turns(codec, {}).after([{"role": "user", "content": "and?"}])
    assert "".join(codec.token_texts(said)) == "user:and?<|end|>assistant:"
    with pytest.raises(ConfigError, match="does not show messages of the role `user`"):
        silent = plain.replace("'tool'", "'user'")
        Turns(chat_codec(tmp_path / "silent", silent), {})


def test_a_template_that_shows_empty_thoughts_in_the_last_turn_alone_is_continued(tmp_path):
    """As Qwen3's: a turn with a thought is the same wherever it stands."""
    qwen3 = TEMPLATE.replace(
        "{{ m.content }}{% for",
        "{% if loop.last and m.role == 'assistant' and '<think>' not in m.content %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}{% for",
    )
    said = Turns(chat_codec(tmp_path, qwen3), {}).between([(LOOK, "a wall")])
    assert said == Turns(chat_codec(tmp_path / "plain"), {}).between([(LOOK, "a wall")])


def test_a_template_shows_tools_or_does_not(tmp_path):
    asked = [{"role": "user", "content": "go"}]
    tools = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    assert Turns(chat_codec(tmp_path), tools).shows_tools(asked)
    assert not Turns(chat_codec(tmp_path / "other", MISTRAL), tools).shows_tools(asked)
