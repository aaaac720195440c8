"""`tandem init`: the file that it writes can be loaded and fits the data and the model."""

import json
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import fakes
import pyarrow
import pytest
from commands import tandem
from pyarrow import parquet

from tandem.cli.run_template import Request, write_run_file
from tandem.data.dataset import load_dataset
from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec
from tandem.rewards.math_answers import final_number, math
from tandem.rewards.reward import Reward
from tandem.settings import loading
from tandem.settings.run import RewardSettings, RunSettings


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a model."""
    fakes.write_tokenizer(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments, file="mine/run.yaml"):
    """Runs the command; returns the settings in the file that it writes."""
    tandem("init", "models/tiny", *arguments, "--output", file)
    return loading.load(RunSettings, Path(file))


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
    assert "junior" not in config.cluster.rollout[0]
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
    assert "none of the columns ask, gold is known to contain the prompt" in done.stderr
    assert "--prompt COLUMN" in done.stderr
    config = init("rows.jsonl", "--prompt", "ask", "--answer", "gold", "--junior", "models/other")
    assert config.data.columns == {"prompt": "ask", "answer": "gold"}
    assert config.cluster.rollout[0]["junior"]["model"] == str(folder / "models" / "other")
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


GSM8K = [
    {
        "question": "w2 w3",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = "
        "<<48+24=72>>72 clips altogether in April and May.\n#### 72",
    },
    {"question": "w4", "answer": "He pays 5 * $200 = $<<5*200=1000>>1000.\n#### 1,000"},
]
MATH = [
    {
        "problem": "w2 w3",
        "solution": "For the piecewise function, $2a+3=0$, so $a+b=-3+3=\\boxed{0}$.",
        "level": "Level 5",
    },
    {"problem": "w4", "solution": "Half of $\\pi$ is $\\boxed{\\frac{\\pi}{2}}$."},
]


def judged(config, *responses):
    """The rewards of responses to the first rows of a run's data."""
    codec = TextCodec(config.tokenizer)
    examples = load_dataset(config.data, codec).examples
    with closing(Reward(config.reward)) as reward:
        reward.check(examples)
        assert reward.warnings(examples) == []
        return reward(examples, responses).rewards


def test_gsm8k_is_judged_by_its_final_numbers(folder):
    rows("gsm8k.jsonl", *GSM8K)
    config = init("gsm8k.jsonl")
    assert config.reward.function == "gsm8k"
    assert config.data.columns == {"prompt": "question"}
    assert config.data.format.endswith("####.")
    right = ["#### 72", "\\boxed{72}", "She sold 72 clips.", "48 + 24 = 72.0\n#### 72 clips"]
    wrong = ["#### 24", "72 or 24", ""]
    dollars = ["$1000", "#### $1,000.00", "It is 1,000."]
    assert judged(config, [*right, *wrong], [*dollars, "999"]) == [
        [1.0] * 4 + [0.0] * 3,
        [1.0] * 3 + [0.0],
    ]


def test_solutions_with_boxes_are_judged_by_math_verify(folder):
    pytest.importorskip("math_verify")
    rows("math.jsonl", *MATH)
    config = init("math.jsonl")
    assert config.reward.function == "math"
    assert config.data.columns == {"prompt": "problem", "answer": "solution"}
    assert "\\boxed{{}}" in config.data.format
    first = ["so \\boxed{0}", "#### 0", "It is 0.", "\\boxed{1}", "", "no answer"]
    second = ["\\boxed{\\dfrac{\\pi}{2}}", "$\\frac{1}{2}\\pi$", "\\boxed{2\\pi}"]
    assert judged(config, first, second) == [[1, 1, 1, 0, 0, 0], [1, 1, 0]]


def test_answers_in_latex_are_judged_by_math_verify(folder):
    pytest.importorskip("math_verify")
    rows(
        "math.jsonl", {"problem": "w2", "answer": "\\frac{1}{2}"}, {"problem": "w3", "answer": "3"}
    )
    config = init("math.jsonl")
    assert config.reward.function == "math"
    assert judged(config, ["\\boxed{0.5}", "\\boxed{2}"], ["\\boxed{3}"]) == [[1, 0], [1]]


def test_a_missing_math_verify_is_an_error_that_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"^reward.function: math: the package math-ve") as caught:
        Reward(RewardSettings(function="math"))
    assert caught.value.hint == "pip install math-verify"


def test_answers_that_span_lines_are_noted(folder):
    rows("rows.jsonl", {"question": "w2", "answer": "w1\nw2"}, {"question": "w4", "answer": "w3"})
    done = tandem("init", "models/tiny", "rows.jsonl", "--output", "run.yaml")
    assert "warning: 1 of the first 2 answers span several lines" in done.stdout
    config = loading.load(RunSettings, Path("run.yaml"))
    assert config.reward.function == "exact_match"
    examples = load_dataset(config.data, TextCodec(config.tokenizer)).examples
    [warning] = Reward(config.reward).warnings(examples)
    assert "spans lines or marks a final answer in 1 of 2 rows" in warning
    rows("rows.jsonl", *GSM8K)
    gsm8k = load_dataset(config.data, TextCodec(config.tokenizer)).examples
    assert "in 2 of 2 rows" in Reward(config.reward).warnings(gsm8k)[0]


def test_an_answer_without_a_number_names_its_row(folder):
    rows("gsm8k.jsonl", *GSM8K)
    config = init("gsm8k.jsonl")
    rows("gsm8k.jsonl", GSM8K[0], {"question": "w2", "answer": "#### none"})
    examples = load_dataset(config.data, TextCodec(config.tokenizer)).examples
    message = r"^reward.function: gsm8k: .*gsm8k.jsonl:2: the answer '#### none' has no number"
    with pytest.raises(ConfigError, match=message):
        Reward(config.reward).check(examples)


def test_a_data_set_of_the_hub_with_several_configurations_is_read(folder, monkeypatch):
    """As openai/gsm8k, whose configurations are main and socratic."""
    data = folder / "hub"
    data.mkdir()
    (data / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n  - {{split: train, path: {name}.jsonl}}\n"
            for name in ("main", "socratic")
        )
        + "---\n"
    )
    for name in ("main", "socratic"):
        rows(data / f"{name}.jsonl", *GSM8K)
    monkeypatch.setattr("tandem.data.hub.snapshot", lambda *args, **options: data)
    names = ["README.md", "main.jsonl", "socratic.jsonl"]
    monkeypatch.setattr("tandem.data.hub.repository_files", lambda *args: names)
    written = write_run_file(Request("models/tiny", "openai/gsm8k"), Path("mine/run.yaml"))
    config = loading.load(RunSettings, written[0])
    assert config.data.hub.name == "openai/gsm8k"
    assert config.data.hub.config == "main"
    assert config.reward.function == "gsm8k"


def test_the_final_number_of_a_text(subtests):
    for text, number in [
        ("#### 1,234.50", "1234.5"),
        ("It costs $-5.", "-5"),
        ("-$7", "-7"),
        ("5-3", "3"),
        ("x2 and 9", "9"),
        ("\\boxed{\\boxed{8}} or 3", "8"),
        ("\\boxed 4$ or 3", "4"),
        ("\\boxed{4", "4"),
        ("#### 3 \\fbox{6}", "6"),
        ("#### none, 3 before", "3"),
        ("none", None),
        ("####", None),
    ]:
        with subtests.test(text=text, number=number):
            assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("#### 10", ["\\boxed{10}", "10.0", "#### 10 dollars"], ["\\boxed{1}", "#### 9"]),
        ("\\boxed{x=5}", ["\\boxed{5}", "$x = 5$"], ["\\boxed{-5}"]),
        ("$\\frac{3}{4}$", ["\\boxed{0.75}", "#### 3/4"], ["\\boxed{\\frac{4}{3}}"]),
        ("\\boxed{\\text{Evelyn}}", ["so \\boxed{Evelyn}"], ["\\boxed{Eve}"]),
        ("\\boxed{(1,2]}", ["\\boxed{(1, 2]}"], ["\\boxed{[1,2]}"]),
        # The model writes what it likes: it is wrong, and ends in time.
        ("7", ["7"], ["\\boxed{10^{10^{10}}}", "\\boxed{\\frac{1}{0}}", "\\boxed{", "{" * 500]),
    ],
)
def test_answers_are_compared_as_mathematics(answer, right, wrong):
    pytest.importorskip("math_verify")
    assert [math("", one, answer) for one in right] == [1.0] * len(right)
    assert [math("", one, answer) for one in wrong] == [0.0] * len(wrong)


def test_an_answer_that_is_no_mathematics_is_named():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        math("", "7", "")
