"""Rows, prompts and rewards."""

import json

import fakes
import pytest

from tandem.data import load_dataset
from tandem.errors import ConfigError
from tandem.rewards import answer_extractor, load_reward
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


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (None, " x \n", "x"),
        (r"-?\d+", "3 + 4 = 7.", "7"),
        (r"answer: (\w+)", "answer: a; answer: b", "b"),
        (r"\d", "none", ""),
    ],
)
def test_the_last_match_is_the_answer(pattern, text, answer):
    assert answer_extractor(pattern)(text) == answer


def test_rewards_are_python_functions_from_a_file(tmp_path, codec):
    file = tmp_path / "judge.py"
    file.write_text("def reward(prompt, response, answer, **row):\n    return row['bonus']\n")
    data = load_dataset(jsonl(tmp_path, {"prompt": "w1", "answer": "w2", "bonus": 0.25}), codec)
    judge = load_reward(RewardSettings(function=f"{file}:reward"))
    assert judge(data.examples[0], "x") == 0.25
    for bad in ("nothing", "no.such.module:f", f"{file}:other"):
        with pytest.raises(ConfigError, match=r"reward\.function"):
            load_reward(RewardSettings(function=bad))


def test_pieces_add_up_to_the_text(codec):
    ids = codec.encode("w1 w2 w3")
    assert "".join(codec.pieces(ids)) == "w1w2w3"
    assert codec.eos_token_id == fakes.EOS
