"""Rows and prompts."""

import json

import fakes
import pytest

from tandem.data import load_dataset
from tandem.errors import ConfigError
from tandem.rewards import load_reward
from tandem.settings import DataSettings, RewardSettings
from tandem.text import TextCodec


@pytest.fixture
def codec(tmp_path):
    return TextCodec(fakes.write_tokenizer(tmp_path / "model"))


def jsonl(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSettings(jsonl=path)


def test_formats_raw_and_chat_prompts(tmp_path, codec):
    settings = jsonl(tmp_path, {"prompt": "w2 w3", "answer": "w4"})
    raw = settings.model_copy(update={"format": "w9 {prompt}"})
    assert load_dataset(raw, codec).examples[0].token_ids == [9, 2, 3]
    chat = settings.model_copy(update={"template": "chat", "system": "w5"})
    assert load_dataset(chat, codec).examples[0].token_ids == [5, 2, 3, 63]
    messages = jsonl(tmp_path, {"messages": [{"role": "user", "content": "w8"}]})
    assert load_dataset(messages, codec).examples[0].token_ids == [8, 63]


def test_reasoning_gym_rows_are_scored_by_their_task(codec):
    settings = DataSettings(
        reasoning_gym={"name": "chain_sum", "size": 5, "seed": 3, "config": {"max_terms": 2}},
        extract="problem: (.*) =",
        format="{prompt} ->",
    )
    data = load_dataset(settings, codec)
    example = data.examples[0]
    assert example.text.endswith(" ->")
    assert "State" not in example.text
    reward = load_reward(RewardSettings(function="reasoning_gym", answer_pattern=r"-?\d+"))
    assert reward(example, f"12 no, {example.row['answer']}.") == 1.0
    assert reward(example, "nothing") == 0.0


def test_batches_are_a_function_of_the_step(tmp_path, codec):
    rows = jsonl(tmp_path, *({"prompt": f"w{i}"} for i in range(1, 11)))
    one, two = (load_dataset(rows, codec, seed=4) for _ in range(2))
    assert [e.text for e in one.batch(3, 4)] == [e.text for e in two.batch(3, 4)]
    epoch = [e.text for step in (1, 2) for e in one.batch(step, 5)]
    assert sorted(epoch) == sorted(f"w{i}" for i in range(1, 11))
    other = load_dataset(rows, codec, seed=5)
    assert [e.text for e in one.batch(1, 10)] != [e.text for e in other.batch(1, 10)]
    assert len(one.without({"w3", "w4"})) == 8


def test_unique_rows_and_a_limit(tmp_path, codec):
    rows = jsonl(tmp_path, *({"prompt": f"w{1 + i % 3}"} for i in range(9)))
    unique = load_dataset(rows.model_copy(update={"unique": True}), codec)
    assert [e.text for e in unique.examples] == ["w1", "w2", "w3"]
    assert len(load_dataset(rows.model_copy(update={"limit": 5}), codec)) == 5


def test_rows_end_at_line_feeds_alone(tmp_path, codec):
    path = tmp_path / "rows.jsonl"
    separators = "w2 \u2028 \u2029 \u0085 \x1c"
    rows = [{"prompt": "w1", "answer": separators}, {"prompt": "w3", "answer": "ä"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    path.write_bytes(text.encode())
    examples = load_dataset(DataSettings(jsonl=path), codec).examples
    assert [example.row["answer"] for example in examples] == [separators, "ä"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "eval.data.jsonl: {path}: No such file"),
        (b"", "eval.data: no rows"),
        (b'{"prompt": "w1"}\n{"prompt": "\xff"}\n', "eval.data.jsonl: {path}:2: not UTF-8"),
        (b'\n{"prompt": "w1"\n', "eval.data.jsonl: {path}:2: not JSON"),
        (b"[" * 100_000, "eval.data.jsonl: {path}:1: not JSON"),
        (b'{"answer": "w1"}', "eval.data.jsonl: {path}:1: a row needs `prompt` or `messages`"),
        (b'{"prompt": 3}', "eval.data.jsonl: {path}:1: `prompt` must be a string"),
        (b'{"messages": "w1"}', "eval.data.jsonl: {path}:1: `messages` must be a list"),
        (b'{"messages": [{"content": 3}]}', "eval.data.jsonl: {path}:1: `messages` must be a list"),
        (b'{"prompt": "\\ud800"}', "eval.data.jsonl: {path}:1: not Unicode text: '\\ud800'"),
    ],
)
def test_a_bad_file_is_named_with_its_field_and_line(tmp_path, codec, content, message):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_dataset(DataSettings(jsonl=path), codec, field="eval.data")
    assert str(caught.value).startswith(message.format(path=path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "{question}"}, "data.format: '{question}' does not fit a row"),
        ({"format": "{prompt.x}"}, "data.format: '{prompt.x}' does not fit a row"),
        ({"format": "{prompt"}, "data.format: '{prompt' does not fit a row"),
        ({"extract": "w(9)"}, "data.extract: no match in the prompt 'w1'"),
        ({"extract": "w1(9)?"}, "data.extract: no match in the prompt 'w1'"),
    ],
)
def test_a_prompt_that_cannot_be_written_is_named(tmp_path, codec, change, message):
    settings = jsonl(tmp_path, {"prompt": "w1"}).model_copy(update=change)
    with pytest.raises(ConfigError) as caught:
        load_dataset(settings, codec)
    assert str(caught.value).startswith(message)


def test_a_reasoning_gym_task_that_does_not_exist_is_named(codec):
    for change in ({"name": "no_such_task"}, {"name": "chain_sum", "config": {"no_option": 1}}):
        with pytest.raises(ConfigError, match=r"^data\.reasoning_gym: "):
            load_dataset(DataSettings(reasoning_gym=change), codec)


def test_training_data_that_is_all_evaluated_is_refused(tmp_path, codec):
    data = load_dataset(jsonl(tmp_path, {"prompt": "w1"}), codec)
    with pytest.raises(ConfigError, match="every prompt occurs in the evaluation data"):
        data.without({"w1"})
