"""`tandem init`: the file that it writes can be loaded and fits the data and the model."""

import json
from pathlib import Path

import fakes
import pyarrow
import pytest
from commands import tandem
from pyarrow import parquet

from tandem import settings
from tandem.rewards import Reward
from tandem.settings import RunSettings


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a model."""
    fakes.write_tokenizer(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments, file="mine/run.yaml"):
    """Runs the command; returns the settings in the file that it writes."""
    tandem("init", "models/tiny", *arguments, "--output", file)
    return settings.load(RunSettings, Path(file))


def rows(name, *values):
    Path(name).write_text("".join(json.dumps(value) + "\n" for value in values))


def test_rows_with_answers_are_judged_by_exact_match(folder):
    rows("rows.jsonl", {"question": "w2 w3", "answer": 5}, {"question": "w4", "answer": 6})
    config = init("rows.jsonl")
    assert config.run_dir == folder / "mine" / "runs" / "mine"
    assert config.tokenizer == folder / "models" / "tiny"
    assert config.data.jsonl == folder / "rows.jsonl"
    assert config.data.columns == {"prompt": "question"}
    assert config.data.template == "chat"
    assert config.reward.function == "exact_match"
    # 2 tokens of the prompt, 1 of the template and 256 of the response, rounded up to 64s.
    assert config.cluster.trainer["max_model_len"] == 320
    assert config.sampling.max_tokens == 256
    assert config.cluster.model == config.tokenizer
    assert "junior_model" not in config.cluster.rollout[0]
    text = (folder / "mine" / "run.yaml").read_text()
    assert "# A row has the columns question, answer.\n" in text
    assert "the longest of the first 200 prompts has 3.\n" in text


def test_rows_without_an_answer_get_a_reward_that_works(folder):
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "w2"}]), "rows.parquet")
    config = init("rows.parquet")
    assert config.data.parquet == folder / "rows.parquet"
    assert config.reward.function == f"{folder}/mine/reward.py:reward"
    Reward(config.reward).close()
    done = tandem("init", "models/tiny", "rows.parquet", "--output", "mine/run.yaml", check=2)
    assert "mine/run.yaml exists" in done.stderr


def test_sizes_fit_the_model(folder):
    (folder / "models" / "tiny" / "config.json").write_text('{"max_position_embeddings": 128}')
    rows("rows.jsonl", {"prompt": "w2 " * 99, "answer": 5})
    config = init("rows.jsonl")
    assert config.cluster.trainer["max_model_len"] == 128
    assert config.sampling.max_tokens == 28
    rows("rows.jsonl", {"prompt": "w2 " * 127, "answer": 5})
    done = tandem("init", "models/tiny", "rows.jsonl", check=2)
    assert "DATA: a prompt has 128 tokens, and the model holds 128 with the response" in done.stderr


def test_columns_and_a_junior_may_be_named(folder):
    fakes.write_tokenizer(folder / "models" / "other")
    rows("rows.jsonl", {"ask": "w2", "gold": "w3"})
    done = tandem("init", "models/tiny", "rows.jsonl", check=2)
    assert "none of the columns ask, gold is known to hold the prompt" in done.stderr
    assert "--prompt COLUMN" in done.stderr
    config = init("rows.jsonl", "--prompt", "ask", "--answer", "gold", "--junior", "models/other")
    assert config.data.columns == {"prompt": "ask", "answer": "gold"}
    assert config.cluster.rollout[0]["junior_model"] == str(folder / "models" / "other")
    done = tandem("init", "models/tiny", "rows.jsonl", "--prompt", "no", check=2)
    assert "--prompt no: the columns are ask, gold" in done.stderr


def test_a_generated_task_is_judged_by_itself(folder):
    (folder / "models" / "tiny" / "chat_template.jinja").unlink()
    config = init("reasoning_gym:chain_sum", file="sums.yaml")
    assert config.run_dir == folder / "runs" / "sums"
    assert config.data.reasoning_gym.name == "chain_sum"
    assert config.data.template == "raw"
    assert config.reward.function == "reasoning_gym"


@pytest.mark.parametrize("data", ["rows.csv", "nothing.jsonl", "no/such/thing"])
def test_data_that_cannot_be_read_leaves_no_file(folder, data):
    done = tandem("init", "models/tiny", data, check=2)
    assert done.stderr.startswith("tandem: DATA")
    assert not (folder / "run.yaml").exists()
