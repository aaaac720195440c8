"""Environment classes of Hugging Face TRL's own examples, as they are, in runs of ours.

TRL_CHECKOUT names a checkout of https://github.com/huggingface/trl, and OPENENV_CHECKOUT one of
OpenEnv's repository (`make test-catalogue`).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import textwrap
from pathlib import Path

import pytest
from commands import records
from openenv_catalogue import CHECKOUT, served
from talking import called, let_write

EXAMPLES = Path(os.environ.get("TRL_CHECKOUT", "")) / "examples" / "scripts" / "openenv"
pytestmark = [
    pytest.mark.skipif(
        not (CHECKOUT and os.environ.get("TRL_CHECKOUT")),
        reason="TRL_CHECKOUT and OPENENV_CHECKOUT name no checkouts of the two repositories",
    ),
    pytest.mark.skipif(
        not importlib.util.find_spec("pyspiel"), reason="open_spiel is not installed"
    ),
]


def part(example, name):
    """The text of a class or function of an example, wherever it stands in it."""
    text = (EXAMPLES / example).read_text()
    [node] = [
        one
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name
    ]
    return textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))


def catch(url):
    """The class of catch.py, which stands in its main(), with its reward function."""
    return "\n\n".join(
        [
            "from openspiel_env import OpenSpielEnv",
            "from openspiel_env.models import OpenSpielAction",
            f"env_url = {url!r}",
            part("catch.py", "CatchEnv"),
            part("catch.py", "reward_from_env"),
            "class Mine(CatchEnv):",
            "    def get_reward(self):",
            "        return reward_from_env([self])[0]",
            "    def close(self):",
            "        self.client.close()",
        ]
    )


def several(url):
    """The module multi_env.py, whose class holds a client of the environment of its row."""
    return "\n".join(
        [
            "from multi_env import MultiEnv, catch_reward",
            f"MultiEnv.catch_url = {url!r}",
            "class Mine(MultiEnv):",
            "    def get_reward(self):",
            "        return catch_reward([self])[0]",
            "    def close(self):",
            "        self._catch_client.close()",
        ]
    )


@pytest.mark.parametrize(("written", "tools"), [(catch, "move stay"), (several, "guess move stay")])
def test_a_class_of_trls_examples_trains(
    written, tools, roomy, world, codec, run_on, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(f"{CHECKOUT}/envs")
    row = {"prompt": "Catch the ball.", "env": "catch"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 12)
    let_write(
        world,
        codec,
        # One that is refused, then to the right and to stay there.
        lambda seed, index, before: (
            called("move", direction=("up", "right", "right")[before.count("<tool_call>")])
            if before.count("<tool_call>") < 3
            else called("stay")
        ),
    )
    with served("openspiel_env", tmp_path) as url:
        (tmp_path / "mine.py").write_text(written(url))
        line = run_on(
            url,
            "steps=2",
            f"environment={{class: {tmp_path}/mine.py:Mine, max_turns: 20}}",
            "sampling.max_tokens=100",
        )
    assert line["step"] == 2
    assert (line["environment/failures"], line["environment/stop_environment"]) == (0, 6)
    assert line["environment/tool_errors"] == 6
    for one in records(tmp_path / "run", 1):
        prompt = "".join(codec.token_texts(one["prompt_token_ids"]))
        assert tools in prompt
        assert "Ball: row 1/10" in prompt
        assert "Error: ValueError: Invalid direction 'up'" in one["text"]
        assert one["reward"] in (0.0, 1.0)
        # The paddle begins in the middle.
        assert "Paddle: column 5/5" in one["text"]
