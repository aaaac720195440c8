"""One environment class in Hugging Face TRL's GRPOTrainer and in a run of ours: the same tokens.

The models of both sides are told what to write.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import fakes
import pytest
import transformers
import trl
import yaml
from commands import records, tandem
from datasets import Dataset
from talking import called, let_write, write_chat_tokenizer
from tandem.models.tokenizer import TextCodec

# It is all that TRL asks of a class; `done` and `close` are our own.
COUNTER = '''
class Counter:
    """A number to count up."""

    def __init__(self):
        self.count = 0

    def reset(self, start, **row):
        self.count = start
        return f" From {start}."

    def add(self, number: int, times: int = 1) -> str:
        """Adds.

        Args:
            number: how much to add.
            times: how many times.
        """
        self.count += number * times
        return f"it is {self.count}"

    async def look(self) -> str:
        """Looks at the number."""
        return f"still {self.count}"

    def get_reward(self) -> float:
        return float(self.count)
'''
# The models' turns: calls with and without words around them, two in one turn, a newline.
TURNS = (
    called("add", number=2),
    "Hm.\n" + called("add", number=3, times=2) + "\n" + called("look"),
    "Then again: " + called("look"),
    "Done.",
)
STARTS = (0, 5, 11)
RETURNS = ', "return": {"type": "string"}'


@pytest.fixture(params=["qwen2_5", "qwen3_instruct_2507"])
def tokenizer_dir(request, tmp_path):
    """A tokenizer with one of the chat templates that TRL ships."""
    templates = Path(trl.__file__).parent / "chat_templates"
    template = (templates / f"{request.param}.jinja").read_text()
    return write_chat_tokenizer(tmp_path / "tokenizer", template)


@pytest.fixture
def env_file(tmp_path):
    """The file of the class."""
    file = tmp_path / "counter.py"
    file.write_text(COUNTER)
    return file


def rows():
    """The rows, as TRL takes them."""
    return [{"prompt": [{"role": "user", "content": "Count."}], "start": n} for n in STARTS]


class ToldTrainer(trl.GRPOTrainer):
    """A trainer that generates the turns of TURNS, and keeps what came of them."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        answers = [
            self._tokenizer.decode(ids).count("<|im_start|>assistant\n") - 1 for ids in prompt_ids
        ]
        end = [self._tokenizer.eos_token_id]
        return [
            self._tokenizer.encode(TURNS[n], add_special_tokens=False) + end for n in answers
        ], None

    def _generate(self, prompts):
        self.generated = super()._generate(prompts)
        return self.generated


def drawn_by_trl(tokenizer_dir, env_file, tmp_path):
    """The prompts, completions and masks of TRL's, and the mean reward."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_dir / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|end|>",
        chat_template=(tokenizer_dir / "chat_template.jinja").read_text(),
    )
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=len(STARTS),
        num_generations=len(STARTS),
        use_cpu=True,
        report_to=[],
        max_completion_length=2048,
    )
    trainer = ToldTrainer(
        model=transformers.Qwen2ForCausalLM(config),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows()),
        args=arguments,
        environment_factory=runpy.run_path(str(env_file))["Counter"],
    )
    trainer._generate_and_score_completions(rows())
    prompts, completions, masks = trainer.generated[:3]
    return list(zip(prompts, completions, masks, strict=True)), trainer._metrics["train"]["reward"]


def drawn_by_a_run(tokenizer_dir, env_file, tmp_path, monkeypatch):
    """The records of a run's first step."""
    world = fakes.FakeWorld()
    codec = TextCodec(tokenizer_dir)
    monkeypatch.setattr(fakes, "VOCABULARY", codec.vocabulary_size)
    world.max_model_len = world.junior_max_model_len = 4096
    let_write(world, codec, lambda seed, index, before: TURNS[before.count("assistant\n")])
    lines = [{"prompt": "Count.", "start": start} for start in STARTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with fakes.serve(world, str(tmp_path / "model")) as address:
        config = {
            "run_dir": "run",
            "steps": 1,
            "tokenizer": str(tokenizer_dir),
            "servers": {"rollout": [address], "trainer": address},
            "data": {"jsonl": "rows.jsonl", "template": "chat"},
            "batch": {"prompts_per_step": len(STARTS), "samples_per_prompt": 1},
            "sampling": {"max_tokens": 400},
            "environment": {"class": f"{env_file}:Counter", "executor": "process"},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        tandem("train", tmp_path / "run.yaml")
    return records(tmp_path / "run", 1)


def test_a_class_of_trls_gives_the_tokens_and_the_mask_that_trl_gives(
    tokenizer_dir, env_file, tmp_path, monkeypatch
):
    theirs, rewards = drawn_by_trl(tokenizer_dir, env_file, tmp_path)
    ours = drawn_by_a_run(tokenizer_dir, env_file, tmp_path, monkeypatch)
    ours.sort(key=lambda one: one["row"]["start"])
    assert [one["row"]["start"] for one in ours] == list(STARTS)
    codec = TextCodec(tokenizer_dir)
    for one, (prompt, completion, mask) in zip(ours, theirs, strict=True):
        # TRL's schemas tell the type of a result, which is text to the model.
        shown = "".join(codec.token_texts(prompt))
        assert shown.count(RETURNS) == 2
        text = "".join(codec.token_texts(one["prompt_token_ids"]))
        assert text == shown.replace(RETURNS, "")
        assert list(one["response_token_ids"]) == completion
        # TRL masks what an environment says, as 0; here it is the third author's.
        assert [int(author != 2) for author in one["authorship_mask"]] == mask
        assert one["authorship_mask"].count(2) > 100
    assert sum(one["reward"] for one in ours) / len(ours) == pytest.approx(rewards[0])
