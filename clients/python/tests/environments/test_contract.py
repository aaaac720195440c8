"""The class of an environment: what it must have, and what is said where it lacks that."""

import re

import pytest
import xxhash
from talking import called

from tandem.data.dataset import Example
from tandem.environments.contract import EnvironmentClass
from tandem.environments.tool_calls import ToolCall, hermes
from tandem.errors import ConfigError
from tandem.settings.environment import EnvironmentSettings

GUESS = '''
class Guess:
    """A number to guess."""

    def reset(self, answer, seed, **row):
        self.answer = answer

    def guess(self, number: int) -> str:
        """Says whether a number is right.

        Args:
            number: the number.
        """
        return "right" if number == self.answer else "wrong"

    async def hint(self) -> str:
        """Gives a hint."""

    def get_reward(self):
        return 1.0

    def close(self):
        pass

    def _helper(self, x):
        pass
'''


def load(tmp_path, text, name="Guess"):
    (tmp_path / "env.py").write_text(text)
    return EnvironmentClass.load(EnvironmentSettings(**{"class": f"{tmp_path}/env.py:{name}"}))


def test_public_methods_are_tools_with_the_schema_of_their_types_and_docstrings(tmp_path):
    found = load(tmp_path, GUESS)
    assert set(found.tools) == {"guess", "hint"}
    assert found.tools["guess"]["function"] == {
        "name": "guess",
        "description": "Says whether a number is right.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "the number."}},
            "required": ["number"],
        },
    }
    assert (found.takes_seed, found.has_reward) == (True, True)
    assert found.digest == xxhash.xxh3_128_hexdigest((tmp_path / "env.py").read_bytes())
    assert hermes(called("guess", number=3))[0].name in found.tools


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def Guess(): pass", r"env\.py:Guess is not a class"),
        ("Guess = 3", "has no function"),
        (GUESS.replace("def reset", "def begin_anew"), "has no method reset"),
        (GUESS.replace("number: int", "number"), r"Guess\.guess: the tool is not described"),
        (GUESS.replace("number: the number.", ""), r"Guess\.guess: the tool is not described"),
        (GUESS.replace('"""Gives a hint."""', "pass"), r"Guess\.hint: the tool is not described"),
        (
            GUESS.replace(
                "    def reset", "    def __init__(self, x):\n        pass\n\n    def reset"
            ),
            "made without arguments",
        ),
        ("class Guess:\n    def reset(self): pass", "has no tool"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
    ],
)
def test_a_class_that_does_not_fit_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=r"^environment\.class: ") as error:
        load(tmp_path, text)
    assert re.search(message, error.value.message)


def test_texts_become_values_of_the_types_in_the_schema(tmp_path):
    found = load(
        tmp_path,
        GUESS.replace("number: int", "number: int, word: str").replace(
            "number: the number.", "number: the number.\n            word: a word."
        ),
    )
    given = {"number": "5", "word": "7", "other": "1"}
    assert found.typed(ToolCall("guess", given, in_text=True)) == given | {"number": 5}
    assert found.typed(ToolCall("guess", {"number": "five"}, in_text=True)) == {"number": "five"}
    # JSON has types of its own.
    assert found.typed(ToolCall("guess", {"number": "5"})) == {"number": "5"}


def example(row, role="user"):
    return Example(row, "", [1], "rows:1", messages=[{"role": role, "content": "go"}])


def test_rows_must_fit_reset(tmp_path):
    found = load(tmp_path, GUESS)
    found.check([example({"prompt": "p", "answer": 3})])
    for row, message in (
        ({"prompt": "p"}, r"reset\(\) cannot be called for rows:1, whose columns are prompt: "),
        ({"answer": 3, "seed": 1}, "a parameter 'seed', which the run fills"),
    ):
        with pytest.raises(ConfigError, match=message):
            found.check([example(row)])


def test_prompts_must_be_conversations_that_end_with_the_user(tmp_path):
    found = load(tmp_path, GUESS)
    with pytest.raises(ConfigError, match="the prompt is not a conversation"):
        found.check([Example({"answer": 3}, "", [1], "rows:1")])
    with pytest.raises(ConfigError, match="the last message is not the user's"):
        found.check([example({"answer": 3}, "assistant")])
