"""Each run file in examples/ trains two steps with tiny models."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import harness
import pytest
import yaml
from commands import tandem

CLUSTERS = set(harness.REPOSITORY.glob("examples/*/cluster.yaml"))
EXAMPLES = sorted(set(harness.REPOSITORY.glob("examples/*/*.yaml")) - CLUSTERS)
# The commands of examples that `tandem train` does not start.
COMMANDS = {
    "recipes/sft": "sft",
    "recipes/dpo": "dpo",
    "recipes/reward_model": "reward-model",
    "coloured_squares": "sft",
    "speculator": "speculator train",
    "tandem_effect/pretrain": "sft",
    "demo/teach": "sft",
    "guess_number/teach": "sft",
    "calculator/teach": "sft",
    "grid_world/teach": "sft",
    "tic_tac_toe/teach": "sft",
}
WITH_CRITIC = {"recipes/ppo", "recipes/reward_model", "zero"}
# Roles that an example runs on two ranks.
WITH_RANKS = {"zero": {"trainer", "critic"}, "megatron": {"trainer"}}
VARYING_REWARD = "def reward(prompt, response, **row):\n    return len(response)\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def model_of(models, tmp_path_factory):
    """A tiny model of the same family, with a chat template, for each model of an example."""
    folder = tmp_path_factory.mktemp("example_models")
    made = {
        "SmolLM2-135M-Instruct": shutil.copytree(models.senior, folder / "llama"),
        "Qwen2.5-1.5B-Instruct": make_qwen(folder / "larger", models.tokenizer, layers=3),
        "Qwen2.5-0.5B-Instruct": make_qwen(folder / "smaller", models.tokenizer, layers=2),
    }
    for directory in made.values():
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return made


@pytest.fixture(scope="session")
def squares(tmp_path_factory):
    """The folder that the example of coloured squares fills: its model, images and rows."""
    folder = tmp_path_factory.mktemp("squares")
    make = runpy.run_path(str(harness.REPOSITORY / "examples/coloured_squares/make.py"))
    make["main"](folder)
    return folder


@pytest.fixture(scope="session")
def seeds(models, tmp_path_factory):
    """The folders of a seed of the examples that make their models and rows; nothing is trained."""
    folders = {}
    scripts = {
        "tandem_effect": "make.py",
        "demo": "sums.py",
        "guess_number": "make.py",
        "calculator": "make.py",
        "grid_world": "make.py",
        "tic_tac_toe": "make.py",
    }
    for name, script in scripts.items():
        folders[name] = tmp_path_factory.mktemp(name)
        runpy.run_path(str(harness.REPOSITORY / "examples" / name / script))["main"](
            folders[name], 0
        )
    for name in ("senior", "junior"):
        effect, demo = folders["tandem_effect"], folders["demo"]
        (effect / name).symlink_to(effect / f"{name}-blank")
        (demo / name).symlink_to(getattr(models, name))
    for name in ("guess_number", "calculator", "grid_world", "tic_tac_toe"):
        (folders[name] / "taught").symlink_to(folders[name] / "blank")
    return folders


def make_qwen(directory: Path, tokenizer: Path, layers: int) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(layers)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=16 * layers,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
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
    """Overrides that give every server a tiny model, 256 tokens and one thread."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        place = f"{path}{key}"
        if isinstance(value, dict | list):
            yield from substitutes(value, model_of, f"{place}.")
        elif key in ("model", "junior_model"):
            yield f"{place}={model_of[Path(value).name]}"
        elif key == "max_model_len":
            yield f"{place}=256"
            yield f"{path}compute.num_threads=1"


def name_of(file: Path) -> str:
    """The name of an example: its folder, and the file's name unless that is run.yaml."""
    folder = file.parent.name
    return folder if file.stem == "run" else f"{folder}/{file.stem}"


# Those of `make test`: an estimator, a critic, ranks and supervised steps each.
# The junior as an opponent, too.
QUICK = {
    "demo", "sums", "recipes/grpo", "recipes/ppo", "recipes/sft", "recipes/dpo",
    "recipes/reward_model", "zero", "tic_tac_toe",
}  # fmt: skip


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=name_of(file), marks=[pytest.mark.slow][name_of(file) in QUICK :])
        for file in EXAMPLES
    ],
)
def test_an_example_trains_two_steps_on_the_servers_that_it_uses(
    file, model_of, squares, seeds, tmp_path, monkeypatch
):
    config = yaml.safe_load(file.read_text())
    if isinstance(config["cluster"], str):
        config["cluster"] = yaml.safe_load((file.parent / config["cluster"]).read_text())
    seed = seeds.get(file.parent.name)
    made = {path.name: path for path in seed.iterdir() if path.is_dir()} if seed else {}
    overrides = [
        *substitutes(config, model_of | {"model": squares / "model"} | made),
        f"run_dir={tmp_path / 'run'}",
        f"cluster.directory={tmp_path / 'cluster'}",
        "steps=2",
        "sampling.max_tokens=8",
        "batch.prompts_per_step=3",
        "batch.samples_per_prompt=2",
    ]
    name = name_of(file)
    command = COMMANDS.get(name, "train")
    if command == "train":
        # A tiny model answers nothing right, and a run that trains nothing is no success.
        (tmp_path / "reward.py").write_text(VARYING_REWARD)
        overrides += [f"reward.function={tmp_path}/reward.py:reward", "rewards=[]"]
    if name == "coloured_squares":
        overrides += [f"data.jsonl={squares}/train.jsonl", f"eval.data.jsonl={squares}/test.jsonl"]
    if seed is not None:
        rows = Path(config["data"]["jsonl"]).name
        overrides.append(f"data.jsonl={seed}/{rows}")
        if "eval" in config:
            overrides.append(f"eval.data.jsonl={seed}/held_out.jsonl")
        else:
            overrides.append("cluster.trainer.optimizer.warmup_steps=1")
    # Paths in a file do not depend on the working directory.
    monkeypatch.chdir(tmp_path)
    tandem(*command.split(), file, *overrides)
    steps = harness.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["version/senior"] for line in steps] == [1, 2]
    assert ("critic/loss" in steps[0]) == (name in WITH_CRITIC)
    servers = {path.stem for path in (tmp_path / "cluster" / "logs" / "attempt_1").glob("*.log")}
    # A run starts the servers that it uses.
    assert ("critic" in servers) == (name in WITH_CRITIC)
    draws = command not in ("sft", "dpo", "reward-model")
    assert ("rollout-0" in servers) == (draws or "eval" in config)
    assert ("trainer" in servers) == (command != "reward-model")
    assert ("rollout-1" in servers) == (name == "two_rollouts")
    if name == "recipes/grpo":
        # cluster.model names both the policy and the reference policy.
        assert steps[0]["policy/kl_to_ref"] == 0
    ranks = {server for server in servers if "-rank-" in server}
    assert ranks == {f"{role}-rank-1" for role in WITH_RANKS.get(name, ())}


@pytest.mark.slow
def test_the_acceptance_of_drafts_is_measured_before_and_after_and_during_grpo(
    model_of, tmp_path, capsys
):
    acceptance = runpy.run_path(str(harness.REPOSITORY / "examples/speculator/acceptance.py"))
    config = yaml.safe_load(acceptance["CONFIG"].read_text())
    (tmp_path / "reward.py").write_text(VARYING_REWARD)
    small = [
        *substitutes(config, model_of),
        f"reward.function={tmp_path}/reward.py:reward",
        f"run_dir={tmp_path / 'run'}",
        f"cluster.directory={tmp_path / 'cluster'}",
        "steps=2",
        "checkpoint.every=0",
        "sft.batch_size=2",
        "sampling.max_tokens=16",
        "eval.data.limit=2",
        "batch.prompts_per_step=2",
        "batch.samples_per_prompt=2",
    ]
    acceptance["main"](small)
    printed = capsys.readouterr().out
    table = [line.split("\t") for line in printed.splitlines() if "\t" in line]
    names = {
        "head, step_000001": "head-step_000001",
        "head, step_000002": "head-step_000002",
        "GRPO step_000002, head before GRPO": "GRPO-step_000002-head-before-GRPO",
        "GRPO step_000002, its head": "GRPO-step_000002-its-head",
    }
    assert [line[0] for line in table] == ["", *names]
    assert table[0][1] == "accepted, temperature 0"
    evals = {name: tmp_path / "evals" / f"{file}.json" for name, file in names.items()}
    for line in table[1:]:
        said = json.loads(evals[line[0]].read_text())
        greedy, sampled = said["results"]
        assert line[3] == f"{greedy['free_fraction']:.0%}"
        assert line[8] == f"{sampled['speed_up']:.2f}"
        assert said["version/senior"] == (0 if line[0].startswith("head") else 2)
    # The senior stays as it is while the head learns, and GRPO trains both.
    steps = harness.json_lines(tmp_path / "head" / "metrics.jsonl")
    assert len({line["speculator/loss"] for line in steps}) == 2
    assert {line["policy/grad_norm"] for line in steps} == {None}
    policy = harness.json_lines(tmp_path / "policy" / "metrics.jsonl")
    assert all(line["speculator/loss"] > 0 for line in policy)
    before = {name: file.stat().st_mtime_ns for name, file in evals.items()}
    acceptance["main"](small)
    assert {name: file.stat().st_mtime_ns for name, file in evals.items()} == before
    assert capsys.readouterr().out.splitlines()[-4:] == printed.splitlines()[-4:]


def test_every_example_is_in_a_table_of_the_readme():
    tables = (harness.REPOSITORY / "examples" / "README.md").read_text()
    for file in EXAMPLES:
        command = COMMANDS.get(name_of(file), "train")
        assert f"`tandem {command} {file.relative_to(harness.REPOSITORY)}`" in tables
