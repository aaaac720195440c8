"""Rows of data sets, and the prompts made of them."""

import json
import sys

import fakes
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tandem.data.dataset import load_dataset
from tandem.data.supervised import LearntRows, with_responses
from tandem.errors import ConfigError, ProblemsError
from tandem.models.tokenizer import TextCodec
from tandem.rewards.reward import Reward
from tandem.settings.run import DataSettings, RewardSettings, SftSettings


@pytest.fixture
def codec(tmp_path):
    return TextCodec(fakes.write_tokenizer(tmp_path / "model"))


def jsonl(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSettings(jsonl=path)


def test_a_prompt_is_raw_text_or_written_by_the_chat_template(tmp_path, codec):
    settings = jsonl(tmp_path, {"prompt": "w2 w3", "answer": "w4"})
    raw = settings.model_copy(update={"format": "w9 {prompt}"})
    assert load_dataset(raw, codec).examples[0].token_ids == [9, 2, 3]
    chat = settings.model_copy(update={"template": "chat", "system": "w5"})
    assert load_dataset(chat, codec).examples[0].token_ids == [5, 2, 3, 63]
    messages = jsonl(tmp_path, {"messages": [{"role": "user", "content": "w8"}]})
    assert load_dataset(messages, codec).examples[0].token_ids == [8, 63]


def test_a_system_message_also_reaches_conversations(tmp_path, codec):
    turn, own = {"role": "user", "content": "w8"}, {"role": "system", "content": "w5"}
    rows = jsonl(tmp_path, {"messages": [turn]}, {"messages": [own, turn]}, {"prompt": "w8"})
    asked = rows.model_copy(update={"system": "w9", "template": "chat"})
    examples = load_dataset(asked, codec).examples
    # A conversation that begins with a system message keeps that one.
    assert [one.token_ids for one in examples] == [[9, 8, 63], [5, 8, 63], [9, 8, 63]]
    assert examples[0].row == {"messages": [turn]}
    with pytest.raises(ConfigError, match=r"^data\.system: does not apply to rows with a `prompt`"):
        load_dataset(rows.model_copy(update={"system": "w9"}), codec)


@pytest.mark.parametrize(("name", "value"), [("format", "w1 {prompt}"), ("extract", "w.")])
def test_a_setting_that_writes_prompts_is_refused_for_a_conversation(tmp_path, codec, name, value):
    rows = jsonl(tmp_path, {"messages": [{"role": "user", "content": "w8"}]})
    with pytest.raises(ConfigError, match=rf"^data\.{name}: .*:1: only applies to a `prompt`"):
        load_dataset(rows.model_copy(update={name: value}), codec)


def test_several_bad_rows_are_named_at_once(tmp_path, codec):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "w1"}\n{"prompt": 1}\n[]\n{"answer": "w1"}\nno\n')
    with pytest.raises(ProblemsError) as caught:
        load_dataset(DataSettings(jsonl=file), codec)
    places = [problem.message.split(": ")[1] for problem in caught.value.problems]
    assert places == [f"{file}:{line}" for line in (2, 3, 4, 5)]
    # A file without any good row reports only its first ten different ones.
    file.write_text("".join(" " * n + "no\n" for n in range(1000)))
    with pytest.raises(ProblemsError) as caught:
        load_dataset(DataSettings(jsonl=file), codec)
    assert len(caught.value.problems) == 10


def test_a_mistake_of_many_rows_is_named_once_and_counted(tmp_path, codec):
    rows = jsonl(tmp_path, *({"question": "w1"} for _ in range(12)))
    renamed = rows.model_copy(update={"columns": {"prompt": "text"}})
    for settings, says in [
        (rows, "a row needs `prompt` or `messages` (and 11 more rows)"),
        (
            renamed,
            "`columns` names 'text', which is not a column; the columns are question (and 11",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_dataset(settings, codec)
        assert not isinstance(caught.value, ProblemsError)
        assert f"{rows.jsonl}:1: {says}" in caught.value.message


def test_a_prompt_without_tokens_names_its_row(tmp_path, codec, subtests):
    for row, changes in [
        ({"prompt": ""}, {}),
        ({"prompt": "  "}, {}),
        ({"prompt": "w1", "extra": ""}, {"format": "{extra}"}),
        ({"prompt": "w1 -> "}, {"extract": "-> (.*)"}),
        ({"messages": [{"role": "user", "content": ""}]}, {}),
        ({"prompt": ""}, {"template": "chat"}),
    ]:
        with subtests.test(row=row, changes=changes):
            (codec.directory / "chat_template.jinja").write_text(
                "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            )
            good = {"prompt": "w1 -> w2", "extra": "w3"}
            settings = jsonl(tmp_path, good, row).model_copy(update=changes)
            with pytest.raises(
                ConfigError, match=rf"^eval.data: {settings.jsonl}:2: the prompt has no"
            ):
                load_dataset(settings, codec, field="eval.data")


def test_tokens_around_a_text_are_no_prompt(tmp_path):
    codec = TextCodec(framing_tokenizer(tmp_path / "framing"))
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        load_dataset(jsonl(tmp_path, {"prompt": ""}), codec)


def framing_tokenizer(directory):
    """A tokenizer that puts w1 before every text and <eos> after it."""
    file = fakes.write_tokenizer(directory) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(
        single="w1 $A <eos>", special_tokens=[("w1", 1), ("<eos>", 0)]
    )
    tokenizer.save(str(file))
    return directory


def test_what_the_tokenizer_adds_to_prompts_is_said_and_can_be_left_out(tmp_path, notes):
    codec = TextCodec(framing_tokenizer(tmp_path / "framing"))
    rows = jsonl(tmp_path, {"prompt": "w5"}, {"prompt": "w1 w6"})
    data = load_dataset(rows, codec)
    assert [one.token_ids for one in data.examples] == [[1, 5, 0], [1, 1, 6, 0]]
    [ends, begins] = notes
    assert ends.startswith("warning: data: the tokenizer ends every prompt with '<eos>'")
    assert "data: 1 of 2 prompts already begin with 'w1'" in begins
    assert f"{rows.jsonl}:2" in begins
    assert all("data.add_special_tokens: false" in note for note in notes)
    notes.clear()
    plain = rows.model_copy(update={"add_special_tokens": False})
    data = load_dataset(plain, codec)
    assert [one.token_ids for one in data.examples] == [[5], [1, 6]]
    # A chat template writes its own.
    chat = rows.model_copy(update={"template": "chat"})
    data = load_dataset(chat, codec)
    assert [one.token_ids for one in data.examples] == [[5, 63], [1, 6, 63]]
    assert notes == []


def test_a_prompt_may_be_a_conversation(tmp_path, codec):
    turns = [{"role": "user", "content": "w8"}]
    for row, columns in (({"prompt": turns}, {}), ({"ask": turns}, {"prompt": "ask"})):
        settings = jsonl(tmp_path, row).model_copy(update={"columns": columns})
        [example] = load_dataset(settings, codec).examples
        assert example.token_ids == [8, 63]
        assert example.row["messages"] == turns
        assert "prompt" not in example.row


def test_a_conversation_that_ends_with_the_assistant_goes_on_there(tmp_path, codec):
    (codec.directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] == 'user' and 'w61' or 'w62' }} {{ m['content'] }} "
        "<eos>{% endfor %}{% if add_generation_prompt %}w62{% endif %}"
    )
    asked = {"role": "user", "content": "w8"}
    begun = {"role": "assistant", "content": "w9 w10"}
    rows = jsonl(tmp_path, {"messages": [asked]}, {"messages": [asked, begun]})
    examples = load_dataset(rows, codec).examples
    assert [one.token_ids for one in examples] == [[61, 8, 0, 62], [61, 8, 0, 62, 9, 10]]


def test_variables_of_the_chat_template_are_set(tmp_path, codec):
    (codec.directory / "chat_template.jinja").write_text(
        "{{ messages[-1]['content'] }} {{ 'w7' if enable_thinking else 'w9' }}"
    )
    rows = jsonl(tmp_path, {"prompt": "w2"}, {"messages": [{"role": "user", "content": "w3"}]})
    for thinks, token in ((True, 7), (False, 9)):
        changes = {"template": "chat", "chat_template_kwargs": {"enable_thinking": thinks}}
        examples = load_dataset(rows.model_copy(update=changes), codec).examples
        assert [one.token_ids for one in examples] == [[2, token], [3, token]]


def sft_ids(rows, codec, **changes):
    """The prompt and the response of every row, by the settings of `tandem sft`."""
    settings = SftSettings(**changes)
    data = load_dataset(rows, codec, learnt=LearntRows(settings))
    learnt = with_responses(data, settings, codec)
    return [(one.token_ids, list(one.response_ids)) for one in learnt.examples]


def test_the_last_turn_of_a_conversation_is_the_answer_to_learn(tmp_path, codec):
    asked = [{"role": "user", "content": "w8"}]
    turns = [*asked, {"role": "assistant", "content": "w9 w10"}]
    parts = [*asked, {"role": "assistant", "content": [{"type": "text", "text": "w9 w10"}]}]
    wanted = [([8, 63], [9, 10, 0])]
    for row in (
        {"messages": turns},
        {"messages": parts},
        {"messages": asked, "answer": "w9 w10"},
        {"prompt": asked, "completion": turns[1:]},
        {"prompt": asked, "completion": "w9 w10"},
        {"conversations": [{"from": "human", "value": "w8"}, {"from": "gpt", "value": "w9 w10"}]},
    ):
        assert sft_ids(jsonl(tmp_path, row), codec) == wanted, row
    # Named by hand it is no part of the prompt, either.
    named = jsonl(tmp_path, {"messages": turns, "answer": "w7"})
    assert sft_ids(named, codec, response="{messages[1][content]}") == wanted
    several = jsonl(tmp_path, {"messages": [*turns, *asked, turns[1]]})
    assert sft_ids(several, codec) == [([8, 9, 10, 8, 63], [9, 10, 0])]
    calls = [*asked, {"role": "assistant", "content": None, "tool_calls": []}]
    with pytest.raises(ConfigError, match=r"^sft.response: .*rows.jsonl:1: 'answer' is null"):
        sft_ids(jsonl(tmp_path, {"messages": calls}), codec)


def test_an_answer_that_ends_with_the_end_token_gets_no_second_one(tmp_path, codec):
    rows = jsonl(tmp_path, {"prompt": "w1", "answer": "w9<eos>"}, {"prompt": "w1", "answer": "w9"})
    assert [response for _, response in sft_ids(rows, codec)] == [[9, 0], [9, 0]]
    assert sft_ids(rows, codec, append_eos=False)[0][1] == [9, 0]


def test_a_conversation_that_the_template_cannot_write_is_named(tmp_path, codec):
    (codec.directory / "chat_template.jinja").write_text("{{ messages[0]['role'] + 'x' }}")
    turn = {"role": "user", "content": "w8"}
    rows = jsonl(tmp_path, {"messages": [turn]}, {"messages": [{"content": "w8"}]})
    with pytest.raises(ConfigError, match=rf"^data: {rows.jsonl}:2: tokenizer: chat template"):
        load_dataset(rows, codec)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "{question}"}, "data.format: '{question}' does not fit a row"),
        ({"system": "w1"}, "data.system: does not apply to rows with a `prompt`"),
    ],
)
def test_a_setting_that_fits_no_row_is_named_once(tmp_path, codec, changes, says):
    rows = jsonl(tmp_path, {"prompt": "w1"}, {"prompt": "w2"}, {"prompt": "w3"})
    with pytest.raises(ConfigError) as caught:
        load_dataset(rows.model_copy(update=changes), codec)
    assert not isinstance(caught.value, ProblemsError)
    assert caught.value.message.startswith(says)


def test_a_missing_chat_template_is_named_once(tmp_path, codec):
    (codec.directory / "chat_template.jinja").unlink()
    turn = {"role": "user", "content": "w8"}
    rows = jsonl(tmp_path, {"prompt": 1}, {"messages": [turn]}, {"messages": [turn]})
    with pytest.raises(ProblemsError) as caught:
        load_dataset(rows, codec)
    [_, missing] = caught.value.problems
    assert missing.message.startswith(f"data: tokenizer: {codec.directory} has no chat template")


def test_parquet_files_hold_rows_too(tmp_path, codec):
    folder = tmp_path / "rows"
    folder.mkdir()
    for number, words in ((0, ["w2", "w3"]), (1, ["w4"])):
        rows = [{"question": word, "answer": 5, "tags": ["a"]} for word in words]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"part-{number}.parquet")
    for path, prompts in ((folder, ["w2", "w3", "w4"]), (folder / "part-1.parquet", ["w4"])):
        settings = DataSettings(parquet=path, columns={"prompt": "question"})
        examples = load_dataset(settings, codec).examples
        assert [example.text for example in examples] == prompts
    assert examples[0].row == {"answer": 5, "tags": ["a"], "prompt": "w4"}
    assert examples[0].place == f"{folder}/part-1.parquet[0]"


def test_a_bad_parquet_file_is_named_with_its_field(tmp_path, codec):
    def fails(path, message):
        with pytest.raises(ConfigError) as caught:
            load_dataset(DataSettings(parquet=path), codec, field="eval.data")
        assert str(caught.value).startswith(f"eval.data.parquet: {message}")

    fails(tmp_path / "none.parquet", f"{tmp_path}/none.parquet: ")
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 and nothing else")
    fails(file, f"{file}: ")
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": 3}]), file)
    fails(file, f"{file}[0]: `prompt` must be a string")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", f"{tmp_path}/empty has no *.parquet file")


def test_a_package_that_is_missing_is_named_with_its_command(tmp_path, codec, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    spec = DataSettings(reasoning_gym={"name": "chain_sum"})
    with pytest.raises(
        ConfigError, match=r"^data\.reasoning_gym: .* reasoning-gym is not"
    ) as caught:
        load_dataset(spec, codec)
    assert caught.value.hint == "pip install reasoning-gym"


def test_columns_get_the_names_that_are_asked_for(tmp_path, codec):
    rows = jsonl(tmp_path, {"question": "w2", "prompt": "w3", "solution": "w4"})
    names = {"prompt": "question", "answer": "solution"}
    [example] = load_dataset(rows.model_copy(update={"columns": names}), codec).examples
    assert example.row == {"prompt": "w2", "answer": "w4"}
    with pytest.raises(ConfigError, match=r":1: `columns` names 'text', which is not a column"):
        load_dataset(rows.model_copy(update={"columns": {"prompt": "text"}}), codec)
    with pytest.raises(
        ConfigError, match="`columns` names 'text', which is not a column"
    ) as caught:
        load_dataset(
            rows.model_copy(update={"columns": {"prompt": "text"}}), codec, field="eval.data"
        )
    assert "eval.data.columns: {}" in caught.value.hint


def test_a_row_without_a_prompt_says_how_to_name_its_column(tmp_path, codec):
    with pytest.raises(ConfigError, match="needs `prompt`") as caught:
        load_dataset(jsonl(tmp_path, {"question": "w2"}), codec)
    assert "columns: {prompt: question}" in caught.value.hint


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
    assert example.place == "chain_sum[0]"
    reward = Reward(RewardSettings(function="reasoning_gym", answer_pattern=r"-?\d+"))
    answers = [f"12 no, {example.row['answer']}.", "nothing"]
    assert reward([example], [answers]).rewards == [[1.0, 0.0]]


def test_batches_are_a_function_of_their_place(tmp_path, codec):
    rows = jsonl(tmp_path, *({"prompt": f"w{i}"} for i in range(1, 11)))
    one, two = (load_dataset(rows, codec, seed=4) for _ in range(2))
    assert [e.text for e in one.batch(8, 4)] == [e.text for e in two.batch(8, 4)]
    # The rows do not depend on how they are cut into batches.
    assert one.batch(8, 4) == one.batch(8, 1) + one.batch(9, 3)
    epoch = [e.text for first in (0, 5) for e in one.batch(first, 5)]
    assert sorted(epoch) == sorted(f"w{i}" for i in range(1, 11))
    other = load_dataset(rows, codec, seed=5)
    assert [e.text for e in one.batch(0, 10)] != [e.text for e in other.batch(0, 10)]
    assert len(one.without({"w3", "w4"})) == 8


def test_unique_drops_repeated_prompts_and_limit_keeps_the_first_rows(tmp_path, codec):
    rows = jsonl(tmp_path, *({"prompt": f"w{1 + i % 3}"} for i in range(9)))
    unique = load_dataset(rows.model_copy(update={"unique": True}), codec)
    assert [e.text for e in unique.examples] == ["w1", "w2", "w3"]
    assert len(load_dataset(rows.model_copy(update={"limit": 5}), codec)) == 5


@pytest.mark.parametrize(
    ("rule", "kept", "note"),
    [
        ("drop", [[1], [1, 2, 3]], "data: 2 of 4 prompts have more than 3 tokens: left out"),
        (
            "truncate_left",
            [[1], [2, 3, 4], [1, 2, 3], [3, 4, 5]],
            "data: 2 of 4 prompts have more than 3 tokens: cut at the left",
        ),
    ],
)
def test_prompts_that_are_too_long_follow_the_rule_and_are_counted(
    tmp_path, codec, rule, kept, note, notes
):
    prompts = ["w1", "w1 w2 w3 w4", "w1 w2 w3", "w1 w2 w3 w4 w5"]
    settings = jsonl(tmp_path, *({"prompt": prompt} for prompt in prompts))
    settings = settings.model_copy(update={"max_prompt_tokens": 3, "too_long": rule})
    examples = load_dataset(settings, codec).examples
    assert [example.token_ids for example in examples] == kept
    assert notes == [note]


def test_a_prompt_that_is_too_long_names_its_row(tmp_path, codec):
    settings = jsonl(tmp_path, {"prompt": "w1"}, {"prompt": "w1 w2 w3"})
    place = f"{tmp_path}/rows.jsonl:2: the prompt has 3 tokens"
    with pytest.raises(ConfigError) as caught:
        load_dataset(settings.model_copy(update={"max_prompt_tokens": 2}), codec)
    assert str(caught.value) == f"data: {place}, but data.max_prompt_tokens allows 2"
    data = load_dataset(settings, codec)
    data.require_prompts_below(4)
    with pytest.raises(ConfigError) as caught:
        data.require_prompts_below(3, "eval.data")
    assert str(caught.value) == f"eval.data: {place}, but the servers' max_model_len allows 2"
    assert "eval.data.too_long" in caught.value.hint


def test_a_rule_for_long_prompts_needs_a_limit(tmp_path):
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        DataSettings(jsonl=tmp_path, too_long="drop")


def test_data_whose_prompts_are_all_too_long_are_refused(tmp_path, codec):
    settings = jsonl(tmp_path, {"prompt": "w1 w2"})
    settings = settings.model_copy(update={"max_prompt_tokens": 1, "too_long": "drop"})
    with pytest.raises(ConfigError, match="no rows that are short enough"):
        load_dataset(settings, codec)


def test_rows_end_at_line_feeds_alone(tmp_path, codec):
    path = tmp_path / "rows.jsonl"
    separators = "w2 \u2028 \u2029 \u0085 \x1c"
    rows = [{"prompt": "w1", "answer": separators}, {"prompt": "w3", "answer": "ä"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    path.write_bytes(text.encode())
    examples = load_dataset(DataSettings(jsonl=path), codec).examples
    assert [example.row["answer"] for example in examples] == [separators, "ä"]


def test_a_bad_file_is_named_with_its_field_and_line(tmp_path, codec, subtests):
    for content, message in [
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
    ]:
        with subtests.test(content=content, message=message):
            path = tmp_path / "rows.jsonl"
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(ConfigError) as caught:
                load_dataset(DataSettings(jsonl=path), codec, field="eval.data")
            assert str(caught.value).startswith(message.format(path=path))


def test_a_prompt_that_cannot_be_written_is_named(tmp_path, codec, subtests):
    for change, message in [
        ({"format": "{question}"}, "data.format: '{question}' does not fit a row"),
        ({"format": "{prompt.x}"}, "data.format: '{prompt.x}' does not fit a row"),
        ({"format": "{prompt"}, "data.format: '{prompt' does not fit a row"),
        ({"extract": "w(9)"}, "data.extract: no match in the prompt 'w1'"),
        ({"extract": "w1(9)?"}, "data.extract: no match in the prompt 'w1'"),
    ]:
        with subtests.test(change=change, message=message):
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
    with pytest.raises(ConfigError, match="every prompt also occurs in the evaluation data"):
        data.without({"w1"})


def test_a_text_is_learnt_whole(tmp_path, codec):
    """As by TRL: every token but the first, which nothing predicts."""
    rows = jsonl(tmp_path, {"text": "w5 w6 w7"}, {"text": "w8 w9<eos>"})
    assert sft_ids(rows, codec) == [([5], [6, 7, 0]), ([8], [9, 0])]
    assert sft_ids(jsonl(tmp_path, {"text": "w5"}), codec) == [([5], [0])]
    rows = jsonl(tmp_path, {"text": "w5 w6 w7"}, {"text": "w8 w9<eos>"})
    framing = TextCodec(framing_tokenizer(tmp_path / "framing"))
    assert sft_ids(rows, framing) == [([1], [5, 6, 7, 0]), ([1], [8, 9, 0, 0])]
    # With an answer a text is no prompt.
    for row in ({"text": "w5", "answer": "w6"}, {"text": 5}):
        with pytest.raises(ConfigError, match="a row needs `prompt` or `messages`"):
            sft_ids(jsonl(tmp_path, row), codec)
    with pytest.raises(ConfigError, match="a row needs `prompt` or `messages`"):
        load_dataset(rows, codec)
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the prompt has no tokens"):
        sft_ids(jsonl(tmp_path, {"text": ""}), codec)


def test_texts_to_learn_that_are_missing_are_named_once(tmp_path, codec):
    rows = jsonl(tmp_path, *({"prompt": f"w{number}"} for number in range(1, 13)))
    with pytest.raises(ConfigError) as caught:
        sft_ids(rows, codec)
    assert not isinstance(caught.value, ProblemsError)
    assert f"{rows.jsonl}:1: the row has no 'answer'" in caught.value.message
    assert caught.value.message.endswith("(and 11 more rows)")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_that_git_lfs_has_not_fetched_are_named(tmp_path, codec, kind):
    file = tmp_path / f"rows.{kind}"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=rf"^data.{kind}: {file}: is a git-lfs pointer"):
        load_dataset(DataSettings(**{kind: file}), codec)
