"""The files in examples/ that people start from, each run for two steps with tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path

import harness
import pytest
import yaml
from commands import tandem

CLUSTERS = set(harness.REPOSITORY.glob("examples/*/cluster.yaml"))
EXAMPLES = sorted(set(harness.REPOSITORY.glob("examples/*/*.yaml")) - CLUSTERS)
SUPERVISED = {"recipes/sft"}
VARYING_REWARD = "def reward(prompt, response, **row):\n    return len(response)\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def model_of(models, tmp_path_factory):
    """What stands for a model that an example names: tiny, of its family, with a chat template."""
    folder = tmp_path_factory.mktemp("example_models")
    made = {
        "SmolLM2-135M-Instruct": shutil.copytree(models.senior, folder / "llama"),
        "Qwen2.5-1.5B-Instruct": make_qwen(folder / "larger", models.tokenizer, layers=3),
        "Qwen2.5-0.5B-Instruct": make_qwen(folder / "smaller", models.tokenizer, layers=2),
    }
    for directory in made.values():
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return made


def make_qwen(directory: Path, tokenizer: Path, layers: int) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(layers)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=16 * layers,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
        initializer_range=0.25,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    return directory


def substitutes(values, model_of, path=""):
    """Overrides for every model that a file names, and for the size of every server."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        place = f"{path}{key}"
        if isinstance(value, dict | list):
            yield from substitutes(value, model_of, f"{place}.")
        elif key in ("model", "senior_model", "junior_model", "reference_model", "tokenizer"):
            yield f"{place}={model_of[Path(value).name]}"
        elif key == "max_model_len":
            yield f"{place}=256"
            yield f"{path}compute.num_threads=1"


def name_of(file: Path) -> str:
    """The name of an example's folder; that of a recipe with its own beside it."""
    folder = file.parent.name
    return folder if file.stem == "run" else f"{folder}/{file.stem}"


@pytest.mark.parametrize("file", EXAMPLES, ids=name_of)
def test_an_example_runs(file, model_of, tmp_path, monkeypatch):
    config = yaml.safe_load(file.read_text())
    if isinstance(config["cluster"], str):
        config["cluster"] = yaml.safe_load((file.parent / config["cluster"]).read_text())
    overrides = [
        *substitutes(config, model_of),
        f"run_dir={tmp_path / 'run'}",
        f"cluster.directory={tmp_path / 'cluster'}",
        "steps=2",
        "sampling.max_tokens=8",
        "batch.prompts_per_step=3",
        "batch.samples_per_prompt=2",
    ]
    name = name_of(file)
    if name == "recipes/dapo":
        # Of right answers there are none: all groups would be dropped.
        (tmp_path / "reward.py").write_text(VARYING_REWARD)
        overrides.append(f"reward.function={tmp_path}/reward.py:reward")
    kind = "sft" if name in SUPERVISED else "train"
    # Files name each other, whatever the working directory is.
    monkeypatch.chdir(tmp_path)
    tandem(kind, file, *overrides)
    steps = harness.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["version/senior"] for line in steps] == [1, 2]
    assert ("critic/loss" in steps[0]) == (name == "recipes/ppo")
    servers = {path.stem for path in (tmp_path / "cluster" / "logs" / "attempt_1").glob("*.log")}
    assert ("rollout-1" in servers) == (name == "two_rollouts")


def test_every_file_is_in_a_table():
    tables = (harness.REPOSITORY / "examples" / "README.md").read_text()
    for file in EXAMPLES:
        command = "sft" if name_of(file) in SUPERVISED else "train"
        assert f"`tandem {command} {file.relative_to(harness.REPOSITORY)}`" in tables
