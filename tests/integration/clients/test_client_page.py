"""The programs of docs/guides/your-own-loop.md do on real servers what the page says."""

from __future__ import annotations

import json
import re

import harness
import pytest

PAGE = (harness.REPOSITORY / "docs/guides/your-own-loop.md").read_text()


@pytest.fixture
def programs(models, fresh_pair):
    """The page's Python programs that name this file, with the model and addresses of this test."""
    places = {
        "models/SmolLM2-135M-Instruct": str(models.tokenizer),
        "127.0.0.1:7701": fresh_pair.rollouts[0].address,
        "127.0.0.1:7702": fresh_pair.trainer.address,
    }
    marker = r"<!-- tested by tests/integration/clients/test_client_page\.py -->"
    marked = rf"^{marker}\n\n```python\n(.*?)^```$"
    found = re.findall(marked, PAGE, re.MULTILINE | re.DOTALL)
    for place, here in places.items():
        found = [program.replace(place, here) for program in found]
    return found


def test_the_example_from_python_trains_and_streams(programs, fresh_pair, capsys):
    step, _, stream = programs
    with (
        harness.trainer_client(fresh_pair) as trainer,
        harness.rollout_client(fresh_pair) as rollout,
    ):
        before = trainer.info().server.weights
        names: dict[str, object] = {}
        exec(step, names)
        after = trainer.info().server.weights
        assert (after.version, after.digest != before.digest) == (before.version + 1, True)
        assert rollout.weights_version() == after
    junior, reward, _ = map(float, capsys.readouterr().out.split())
    assert junior < 0
    assert reward < 0
    exec(stream, names)
    assert capsys.readouterr().out.startswith("[")


def test_the_loop_of_less_than_twenty_lines_trains(programs, fresh_pair, tmp_path):
    step, loop, _ = programs
    assert len(loop.splitlines()) < 20
    # The texts of the tiny model have some letters and not others.
    rows = [{"prompt": f"one two {i}", "answer": letter} for i, letter in enumerate("etaoinsh")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loop = loop.replace("train.jsonl", str(tmp_path / "train.jsonl")).replace("101", "4")
    names: dict[str, object] = {"json": json}
    exec(step.partition("def judge")[0], names)
    exec(loop, names)
    with (
        harness.trainer_client(fresh_pair) as trainer,
        harness.rollout_client(fresh_pair) as rollout,
    ):
        assert names["weights"] == trainer.info().server.weights == rollout.weights_version()
    assert names["weights"].version >= 2
