"""The memory in the table of the page on clusters is what the servers' --check-config prints."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess

import harness
import pytest
from tandem.cluster.local import find_binary

PAGE = (harness.REPOSITORY / "docs/operations/cluster.md").read_text()
ROWS = re.findall(
    r"^\| ([\w.-]+) \| (trainer|critic|rollout) \|\s*`?(.*?)`?\s*\| (\d+) \| ([\d.]+) \|$",
    PAGE,
    re.MULTILINE,
)
# From the config.json of each: layers, hidden and intermediate size, heads, KV heads, vocabulary.
LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 1e5}
QWEN = {"model_type": "qwen2", "rope_theta": 1e6}
SHAPES = {
    "SmolLM2-135M": (LLAMA, (30, 576, 1536, 9, 3, 49152)),
    "Qwen2.5-0.5B": (QWEN | {"tie_word_embeddings": True}, (24, 896, 4864, 14, 2, 151936)),
    "Qwen2.5-7B": (QWEN | {"tie_word_embeddings": False}, (28, 3584, 18944, 28, 4, 152064)),
}
FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@pytest.fixture(scope="module")
def directories(models, tmp_path_factory):
    """A directory for each shape, whose weights are a header and a hole in a file."""
    return {
        name: make_model(tmp_path_factory.mktemp(name), name, models.tokenizer) for name in SHAPES
    }


def make_model(directory, name, tokenizer):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, sizes = SHAPES[name]
    values = family | dict(zip(FIELDS, sizes, strict=True)) | {"eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 8192}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    header, end = {}, 0
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name == "lm_head.weight" and values["tie_word_embeddings"]:
            continue
        begin, end = end, end + 2 * tensor.numel()
        entry = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[tensor_name] = entry
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (directory / "tokenizer.json").symlink_to(tokenizer / "tokenizer.json")
    return directory


def test_a_row_of_the_table_is_what_check_config_prints(directories, subtests):
    for model, role, settings, ranks, gigabytes in ROWS:
        with subtests.test(
            model=model, role=role, settings=settings, ranks=ranks, gigabytes=gigabytes
        ):
            fields = ("senior_model", "junior_model") if role == "rollout" else ("model",)
            models = [f"{field}={directories[model]}" for field in fields]
            # The figures do not depend on this machine's memory.
            if role == "rollout":
                models.append("kv_cache_bytes=1000000000000000")
            variables = {
                "RANK": "0",
                "WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            }
            command = [find_binary(f"tandem-{role}-server"), "--check-config", "max_model_len=1024"]
            done = subprocess.run(
                [*map(str, command), *models, *settings.split()],
                env=dict(os.environ) | (variables if ranks != "1" else {}),
                capture_output=True,
                text=True,
                timeout=60,
            )
            # It prints the figures of a configuration that this machine cannot hold, too.
            [total] = re.findall(r"^# +([\d.]+) GB +in all$", done.stdout, re.MULTILINE)
            assert float(total) == pytest.approx(float(gigabytes), abs=0.06), done.stdout


def test_a_cache_that_nobody_sized_fits_into_the_memory(directories):
    program = find_binary("tandem-rollout-server")
    model = f"senior_model={directories['SmolLM2-135M']}"
    done = subprocess.run(
        [program, "--check-config", model, "max_model_len=8192", "max_num_seqs=65536"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    room = r"senior_kv_cache: room for (\d+) of max_num_seqs=65536 sequences of 8192 tokens"
    assert 1 <= int(re.search(room, done.stdout)[1]) < 65536
    [needed, available] = re.findall(r"([\d.]+) GB +(?:in all|available)", done.stdout)
    # The plan leaves a tenth free; the memory is read again for this line, while others use it.
    assert 0.5 * float(available) < float(needed) < float(available)


def plan_of_a_speculator(model, *settings):
    settings = ("adapter=mlp", "n_predict=1", "optimizer.learning_rate=0.001", *settings)
    done = subprocess.run(
        [
            find_binary("tandem-trainer-server"),
            "--check-config",
            f"model={model}",
            *(f"speculator.{setting}" for setting in settings),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    parts = re.findall(r"^# +([\d.]+) GB +(\w+)", done.stdout, re.MULTILINE)
    return {name: float(gigabytes) for gigabytes, name in parts}


def test_a_speculator_is_in_the_plan_of_every_rank(directories):
    plan = plan_of_a_speculator(directories["SmolLM2-135M"])
    planned = {
        name.removeprefix("speculator_"): gigabytes
        for name, gigabytes in plan.items()
        if name.startswith("speculator_")
    }
    # Embedding and head, one projection, the norm.
    hidden, vocabulary = 576, 49152
    values = 2 * vocabulary * hidden + hidden * hidden + 2 * hidden
    one = pytest.approx(4 * values / 1e9, abs=0.001)
    assert planned["weights"] == one
    assert planned["gradients"] == one
    assert planned["optimizer"] == pytest.approx(8 * values / 1e9, abs=0.001)
    assert planned["logits"] == plan["logits"] > 0
    assert planned["staging"] == pytest.approx(12 * values / 1e9, abs=0.001)
    assert planned["snapshot"] == planned["staging"]


def test_a_frozen_base_has_neither_gradients_nor_moments_in_the_plan(directories):
    model = directories["SmolLM2-135M"]
    trained = plan_of_a_speculator(model)
    frozen = plan_of_a_speculator(model, "freeze_base_model=true")
    of_training = {"gradients", "optimizer", "checkpoint_snapshot"}
    assert of_training == trained.keys() - frozen.keys()
    assert frozen["activations"] < 0.2 * trained["activations"]
    differing = {name for name in frozen if frozen[name] != trained[name]}
    assert differing <= {"activations", "in", "available"}


def test_the_table_has_every_server_and_a_layout():
    assert {role for _, role, *_ in ROWS} == {"rollout", "trainer", "critic"}
    assert {model for model, *_ in ROWS} == SHAPES.keys()
    assert {ranks for *_, ranks, _ in ROWS} > {"1"}
