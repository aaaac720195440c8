"""The calls of tools in what models write."""

import pytest

from tandem.environments.tool_calls import (
    BadCall,
    ToolCall,
    format_of,
    hermes,
    llama3,
    mistral,
    qwen_xml,
)
from tandem.errors import ConfigError

LOOK = ToolCall("look", {"x": 1})


@pytest.mark.parametrize(
    ("parse", "text", "found"),
    [
        (hermes, "no call", []),
        (
            hermes,
            'I look. <tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
            [LOOK],
        ),
        (
            hermes,
            '<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'
            '<tool_call>{"name": "go"}</tool_call>',
            [LOOK, ToolCall("go")],
        ),
        (
            qwen_xml,
            "Look.\n<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n"
            "<parameter=text>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
            [ToolCall("look", {"x": "1", "text": "two\nlines"}, in_text=True)],
        ),
        (llama3, "5 {apples}", []),
        (llama3, '{"name": "look", "parameters": {"x": 1}}', [LOOK]),
        (llama3, '<|python_tag|>{"name": "look", "parameters": {"x": 1}}', [LOOK]),
        (
            llama3,
            '{"name": "look", "parameters": {"x": 1}}; {"name": "go", "arguments": {}}',
            [LOOK, ToolCall("go")],
        ),
        (mistral, "no call", []),
        (
            mistral,
            '[TOOL_CALLS] [{"name": "look", "arguments": {"x": 1}, "id": "abcdefghi"}]',
            [ToolCall("look", {"x": 1}, "abcdefghi")],
        ),
        (mistral, '[TOOL_CALLS]look[ARGS]{"x": 1}', [LOOK]),
        (
            mistral,
            'I look.[TOOL_CALLS]look[ARGS]{"x": 1}\n[TOOL_CALLS]go[ARGS]{}',
            [LOOK, ToolCall("go")],
        ),
        (
            mistral,
            '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS] {"x": 1}',
            [ToolCall("look", {"x": 1}, "abcdefghi")],
        ),
    ],
)
def test_calls_are_found_in_each_format(parse, text, found):
    assert parse(text) == found


@pytest.mark.parametrize(
    ("parse", "text", "why"),
    [
        (hermes, "<tool_call>{bad}</tool_call>", "is not JSON"),
        (hermes, '<tool_call>{"name": "look"}', "is not closed"),
        (hermes, '<tool_call>["look"]</tool_call>', 'not an object with a "name"'),
        (hermes, '<tool_call>{"name": "look", "arguments": [1]}</tool_call>', '"arguments" is not'),
        (qwen_xml, '<tool_call>{"name": "look"}</tool_call>', "is not <function=NAME>"),
        (qwen_xml, "<tool_call><function=look></function>", "is not closed"),
        (llama3, '{"name": "look", "parameters": {', "is not JSON"),
        (llama3, "<|python_tag|>look(1)", "is not JSON"),
        (mistral, "[TOOL_CALLS] [look]", "is not JSON"),
        (mistral, "[TOOL_CALLS] {}", "is not a list"),
        (mistral, "[TOOL_CALLS] look", "neither a list nor NAME[ARGS]"),
        (mistral, "[TOOL_CALLS]look[ARGS]", "the arguments of look are not JSON"),
        (mistral, '[TOOL_CALLS]look[ARGS]{"x": 1} more', "the arguments of look are not JSON"),
        (mistral, "[TOOL_CALLS]look[ARGS][1]", '"arguments" is not an object'),
    ],
)
def test_a_call_that_cannot_be_read_says_why(parse, text, why):
    [found] = parse(text)
    assert isinstance(found, BadCall)
    assert why in found.why


def test_one_bad_call_of_mistral_leaves_the_others():
    found = mistral('[TOOL_CALLS]look[ARGS]{"x": [TOOL_CALLS]look[ARGS]{"x": 1}')
    assert isinstance(found[0], BadCall)
    assert found[1:] == [LOOK]


def test_the_format_follows_from_the_chat_template():
    assert format_of("… <tool_call> …") == "hermes"
    assert format_of("… [TOOL_CALLS] …") == "mistral"
    assert format_of("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}") == "mistral"
    assert format_of('Environment: ipython {"name": …, "parameters": …}') == "llama3"
    with pytest.raises(ConfigError, match=r"^environment\.tool_calls: .* names no format"):
        format_of("{{ messages }}")
    assert format_of("<tool_call>\n<function=look>\n<parameter=x>") == "qwen_xml"
    with pytest.raises(ConfigError, match="calls as GLM writes them, which are not read"):
        format_of("<tool_call>look\n<arg_key>x</arg_key>")
