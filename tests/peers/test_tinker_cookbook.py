"""Recipes of tinker-cookbook, unchanged, on our servers with a tiny model of this machine.

What a recipe would download is replaced: its model, its data, and the table of renderers by model.
"""

from __future__ import annotations

import asyncio
import json
import random
import types as modules

import chz
import harness
import httpx2
import numpy as np
import pytest
import talking
import tinker
import torch
from tinker import types
from tinker_cookbook import model_info
from tinker_cookbook.recipes import rl_basic, sl_basic
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.recipes.rl_numerics_check import env as counting
from tinker_cookbook.recipes.rl_numerics_check import train as rl_numerics_check
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.metrics import compute_kl_sample_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from transformers import LlamaConfig, LlamaForCausalLM

KEY = "tml-any"
# The rank that recipes ask for.
LORA = {"lora": {"rank": 32, "alpha": 64}}
# The prompt of the counting environment, in bytes.
MAX_MODEL_LEN = 4096
WORDS = counting.DEFAULT_WORDS


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Servers of a model that reads bytes and Qwen's marks: their URL and the model's directory."""
    place = tmp_path_factory.mktemp("cookbook")
    model = talking.write_chat_tokenizer(place / "model")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256 + len(talking.SPECIAL),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    models = harness.Models(model, model, model)
    length = {"max_model_len": MAX_MODEL_LEN}
    with (
        harness.cluster(
            place, models, rollout=length | {"senior": LORA}, trainer=length | LORA
        ) as running,
        harness.tinker_server(
            running, place / "checkpoints", "--unembed-optional", "--model-name", str(model)
        ) as url,
    ):
        yield modules.SimpleNamespace(url=url, model=str(model))


@pytest.fixture(autouse=True)
def sessions(served, monkeypatch):
    """The SDK's key; afterwards the sessions of a test are ended, as a recipe leaves its own."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_BASE_URL", served.url)
    yield
    pages = f"{served.url}/api/v1/sessions"
    headers = {"x-api-key": KEY}
    for name in httpx2.get(pages, headers=headers).json()["sessions"]:
        body = {"reason": {"type": "success"}}
        httpx2.post(f"{pages}/{name}/finish", headers=headers, json=body)


@pytest.fixture
def renderer(monkeypatch):
    """Sets the renderer that the cookbook recommends for the model."""

    def use(name):
        monkeypatch.setattr(model_info, "get_recommended_renderer_names", lambda model: [name])

    return use


def steps(log_path):
    """Returns the metrics that a recipe has written, by step."""
    lines = (log_path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def kls(rows):
    """Returns both numbers of the cookbook's KL in each step that has them."""
    return [
        (row["optim/kl_sample_train_v1"], row["optim/kl_sample_train_v2"])
        for row in rows
        if "optim/kl_sample_train_v1" in row
    ]


def test_the_cookbooks_kl_is_zero_until_the_weights_move(served):
    """Sampling and training compute the same bits; after a step the function sees a difference."""
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(served.model, rank=32).result(timeout=120)
    prompt = model.get_tokenizer().encode("What is 2 + 2?")
    for _ in range(2):
        sampler = model.save_weights_and_get_sampling_client().result(timeout=120)
        params = types.SamplingParams(max_tokens=24, seed=3)
        drawn = sampler.sample(types.ModelInput.from_ints(prompt), 8, params).result(timeout=120)
        sent, marked = [], []
        for number, one in enumerate(drawn.sequences):
            whole = [*prompt, *one.tokens]
            before, count = len(prompt) - 1, len(one.tokens)
            inputs = {
                "target_tokens": whole[1:],
                "logprobs": [0.0] * before + list(one.logprobs),
                "advantages": [0.0] * before + [(-1.0) ** number] * count,
            }
            mask = {
                "mask": types.TensorData.from_torch(
                    (torch.arange(before + count) >= before).float()
                )
            }
            read = types.ModelInput.from_ints(whole[:-1])
            sent.append(types.Datum(read, inputs))
            marked.append(types.Datum(read, inputs | mask))

        def kl(output, marked=marked):
            logprobs = [one["logprobs"].to_torch() for one in output.loss_fn_outputs]
            found = compute_kl_sample_train(marked, logprobs)
            return found["optim/kl_sample_train_v1"], found["optim/kl_sample_train_v2"]

        losses = model.forward_backward(sent, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=120)
        assert kl(losses.result(timeout=120)) == (0.0, 0.0)
        moved = kl(model.forward(sent, "importance_sampling").result(timeout=120))
        assert moved[1] > 1e-6


def test_sl_basic(served, renderer, tmp_path):
    """Three steps on a file of conversations, as the recipe says to swap in one's own data."""
    renderer("role_colon")
    file = tmp_path / "data.jsonl"
    pairs = [(f"What is {i} + 1?", f"It is {i + 1}.") for i in range(24)]
    file.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": answer},
                    ]
                }
            )
            + "\n"
            for question, answer in pairs
        )
    )
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=served.model,
        renderer_name="role_colon",
        max_length=256,
        batch_size=8,
    )
    changed = {
        "log_path": str(tmp_path / "log"),
        "dataset_builder": FromConversationFileBuilder(common_config=common, file_path=str(file)),
        "learning_rate": 5e-3,
        "eval_every": 0,
        "base_url": served.url,
    }
    sl_basic.main(sl_basic.build_config_blueprint(served.model).apply(changed).make())
    losses = [row["train_mean_nll"] for row in steps(tmp_path / "log") if "train_mean_nll" in row]
    assert len(losses) == 3
    assert losses[0] > losses[-1] > 0


def test_rl_basic(served, renderer, tmp_path):
    """Three steps on the cookbook's sums in place of GSM8K; the KL is 0 in each."""
    renderer("role_colon")
    changed = {
        "log_path": str(tmp_path / "log"),
        "dataset_builder": ArithmeticDatasetBuilder(
            batch_size=2,
            group_size=4,
            n_batches=3,
            model_name_for_tokenizer=served.model,
            renderer_name="role_colon",
        ),
        "max_tokens": 12,
        "base_url": served.url,
    }
    rl_basic.main(rl_basic.build_config_blueprint(served.model).apply(changed).make())
    assert kls(steps(tmp_path / "log")) == [(0.0, 0.0)] * 3


def test_rl_numerics_check(served, monkeypatch, renderer, tmp_path):
    """Two steps of the recipe that checks numerics, on a text made here; it prints a KL of 0."""
    renderer("qwen3")
    draws = random.Random(1)
    text = " ".join(draws.choice(WORDS) for _ in range(4000))
    monkeypatch.setattr(counting, "load_wikitext_corpus", lambda: text)
    task = counting.CountingTaskConfig(num_pages_min=1, num_pages_max=2, page_chars=100)
    settings = chz.replace(
        rl_numerics_check.CLIConfig(),
        model_name=served.model,
        renderer_name="qwen3",
        group_size=3,
        groups_per_batch=1,
        max_tokens=12,
        max_trajectory_tokens=MAX_MODEL_LEN,
        task=task,
        max_steps=2,
        base_url=served.url,
        log_path=str(tmp_path / "log"),
    )
    asyncio.run(rl_train.main(rl_numerics_check.build_config(settings)))
    found = kls(steps(tmp_path / "log"))
    assert len(found) == 2
    assert np.count_nonzero(found) == 0
