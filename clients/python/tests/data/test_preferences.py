"""Pairs of a chosen and a rejected response, made of rows of every form that TRL has."""

import json

import fakes
import pytest

from tandem.data.dataset import load_dataset
from tandem.data.preferences import margin_of, with_pairs, with_prompt
from tandem.data.supervised import require_lengths
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec
from tandem.settings.run import DataSettings, DpoSettings, ReasoningGymSettings


@pytest.fixture
def codec(tmp_path):
    return TextCodec(fakes.write_tokenizer(tmp_path / "model"))


def pairs_of(tmp_path, codec, *rows, settings=None, **data):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSettings(jsonl=path, **data)
    data = load_dataset(source, codec, prepare=with_prompt)
    settings = settings or DpoSettings()
    reference = settings.reference_source == "rows"
    return with_pairs(
        data, codec, "dpo", append_eos=settings.append_eos, reference=reference
    ).examples


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# Rows that all ask w2 and answer w3 or w4 w5, and the chat template ends a prompt with w63.
CONVERSATIONS = {
    "an explicit prompt": {
        "prompt": [user("w2")],
        "chosen": [assistant("w3")],
        "rejected": [assistant("w4 w5")],
    },
    "an implicit prompt": {
        "chosen": [user("w2"), assistant("w3")],
        "rejected": [user("w2"), assistant("w4 w5")],
    },
    "the prompt's text beside whole conversations": {
        "prompt": "w2",
        "chosen": [user("w2"), assistant("w3")],
        "rejected": [user("w2"), assistant("w4 w5")],
    },
    "ShareGPT's names": {
        "chosen": [{"from": "human", "value": "w2"}, {"from": "gpt", "value": "w3"}],
        "rejected": [{"from": "human", "value": "w2"}, {"from": "gpt", "value": "w4 w5"}],
    },
}


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_conversations_share_their_prompt(tmp_path, codec, form):
    [pair] = pairs_of(tmp_path, codec, CONVERSATIONS[form])
    assert pair.token_ids == [2, 63]
    assert pair.response_ids == [3, fakes.EOS]
    assert pair.rejected_ids == [4, 5, fakes.EOS]


def test_texts_follow_a_prompt_as_it_is_or_written_by_the_chat_template(tmp_path, codec):
    row = {"prompt": "w2", "chosen": "w3 <eos>", "rejected": "w4"}
    plain = DpoSettings(append_eos=False)
    [pair] = pairs_of(tmp_path, codec, row)
    assert (pair.token_ids, pair.response_ids, pair.rejected_ids) == ([2], [3, 0], [4, 0])
    [pair] = pairs_of(tmp_path, codec, row, settings=plain, template="chat")
    assert (pair.token_ids, pair.response_ids, pair.rejected_ids) == ([2, 63], [3, 0], [4])
    renamed = {"question": "w2", "yes": "w3", "no": "w4"}
    columns = {"prompt": "question", "chosen": "yes", "rejected": "no"}
    assert pairs_of(tmp_path, codec, renamed, columns=columns)[0].rejected_ids == [4, 0]


def test_a_turn_in_the_middle_belongs_to_the_prompt_if_both_share_it(tmp_path, codec):
    begin = [user("w2"), assistant("w6"), user("w7")]
    row = {"chosen": [*begin, assistant("w3")], "rejected": [*begin, assistant("w4")]}
    [pair] = pairs_of(tmp_path, codec, row)
    assert pair.token_ids == [2, 6, 7, 63]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "w2", "chosen": "w3"}, "rows.jsonl:1: the row has no 'rejected' beside its"),
        ({"prompt": "w2", "rejected": "w3"}, "the row has no 'chosen' beside its 'rejected'"),
        ({"prompt": "w2", "answer": "w3"}, "the row has no 'chosen'$"),
        ({"prompt": "w2", "chosen": "w3", "rejected": None}, "the row has no 'rejected'"),
        ({"prompt": "w2", "chosen": "", "rejected": "w3"}, "'chosen' is empty"),
        ({"chosen": "w3", "rejected": "w4"}, "a row needs `prompt` or `messages`"),
        ({"prompt": "w2", "chosen": "w3", "rejected": [assistant("w4")]}, "'chosen' must be a tex"),
        ({"prompt": "w2", "chosen": 3, "rejected": 4}, "'chosen' must be a text or a list"),
        ({"chosen": [assistant("w3")], "rejected": [assistant("w4")]}, "the row has no prompt"),
        (
            {"chosen": [user("w2"), user("w3")], "rejected": [user("w2"), assistant("w4")]},
            "'chosen' must add one message of the assistant's",
        ),
        (
            {"prompt": [user("w2")], "chosen": [assistant("w3"), user("w4"), assistant("w5")],
             "rejected": [assistant("w4")]},
            "'chosen' must add one message of the assistant's",
        ),
    ],
)  # fmt: skip
def test_half_a_pair_and_other_forms_are_refused_by_name(tmp_path, codec, row, told):
    with pytest.raises(ConfigError, match=told):
        pairs_of(tmp_path, codec, row, settings=DpoSettings(append_eos=False))


def test_a_task_without_pairs_is_refused(codec):
    pytest.importorskip("reasoning_gym")
    task = DataSettings(reasoning_gym=ReasoningGymSettings(name="chain_sum", size=1))
    data = load_dataset(task, codec, prepare=with_prompt)
    with pytest.raises(ConfigError, match="the row has no 'chosen'"):
        with_pairs(data, codec, "dpo", append_eos=True)


def test_log_probs_of_the_reference_may_come_with_the_rows(tmp_path, codec):
    settings = DpoSettings(reference_logprobs="rows")
    row = {"prompt": "w2", "chosen": "w3", "rejected": "w4"}
    given = {"ref_chosen_logps": -3.5, "ref_rejected_logps": -2}
    assert pairs_of(tmp_path, codec, row | given, settings=settings)[0].row.items() >= given.items()
    for bad in ({}, {"ref_chosen_logps": 0.5}, {"ref_chosen_logps": True}):
        with pytest.raises(ConfigError, match="'ref_chosen_logps' must be a number of at most 0"):
            whole = row | {"ref_rejected_logps": -2.0} | bad
            pairs_of(tmp_path, codec, whole, settings=settings)


def test_pairs_that_teach_nothing_are_counted(tmp_path, codec, caplog):
    rows = [{"prompt": "w2", "chosen": "w3", "rejected": text} for text in ("w3", "w4")]
    pairs_of(tmp_path, codec, *rows)
    assert "1 of 2 pairs teach nothing" in caplog.text


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
def test_the_response_that_is_too_long_is_named(tmp_path, codec, longer):
    row = {"prompt": "w2", "chosen": "w3", "rejected": "w4", longer: "w5 w6 w7 w8"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    data = load_dataset(DataSettings(jsonl=path), codec, prepare=with_prompt)
    data = with_pairs(data, codec, "dpo", append_eos=True)
    with pytest.raises(ConfigError, match=rf"data: {longer}: .*:1: prompt and response have 6 tok"):
        require_lengths(data, 5)
    require_lengths(data, 6)


def test_a_margin_is_a_number_of_the_row(tmp_path, codec):
    row = {"prompt": "w2", "chosen": "w3", "rejected": "w4"}
    assert [margin_of(one) for one in pairs_of(tmp_path, codec, row, row | {"margin": 2})] == [0, 2]
    [pair] = pairs_of(tmp_path, codec, row | {"margin": "much"})
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: 'margin' must be a number"):
        margin_of(pair)
