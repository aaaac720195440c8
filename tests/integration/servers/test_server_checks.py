"""Servers before there is work: configurations, objectives, vocabularies, base models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import harness
import pytest
import torch
import xxhash
from tandem._proto.critic.v1 import critic_pb2
from tandem.cluster.local import find_binary
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import to_tensor
from tokenizers import Tokenizer

MODEL_FIELD = {"rollout": "senior_model", "trainer": "model", "critic": "model"}


def check(role, model, *arguments):
    """Runs `--check-config` of a server with `model`."""
    command = [find_binary(f"tandem-{role}-server"), "--check-config", *arguments]
    overrides = [f"{MODEL_FIELD[role]}={model}"]
    if role == "critic":
        overrides.append("untie_embeddings=true")
    return subprocess.run(
        [*map(str, command), *overrides], capture_output=True, text=True, timeout=60
    )


def edited(model, directory, file, **changes):
    """A copy of a model with other top-level values in one of its JSON files."""
    shutil.copytree(model, directory)
    document = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(document | changes))
    return directory


@pytest.mark.parametrize("role", MODEL_FIELD)
@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_size_that_the_weights_do_not_have_is_refused_at_once(models, tmp_path, role, field):
    absurd = edited(models.senior, tmp_path / "model", "config.json", **{field: 2_000_000_000})
    refused = check(role, absurd)
    assert refused.returncode == 2
    assert f"{MODEL_FIELD[role]}.config.json.{field}: is 2000000000" in refused.stderr


@pytest.mark.parametrize("role", MODEL_FIELD)
def test_a_device_that_this_build_does_not_have_is_refused_at_once(models, role):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    refused = check(role, models.senior, "compute.device=cuda")
    assert refused.returncode == 2
    # A build for GPUs says so of the machine.
    assert "compute.device: this build has no CUDA code" in refused.stderr or (
        "compute.device: this machine has no usable CUDA device" in refused.stderr
    )


@pytest.mark.parametrize("role", MODEL_FIELD)
def test_gpus_that_are_not_there_are_planned_for(models, role):
    on_gpu = ("compute.device=cuda", "compute.dtype=bfloat16", "--assume-gpu-memory")
    planned = check(role, models.senior, *on_gpu, "80GB")
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"#   GPU of a rank: [\d.]+ GB needed, 80.000 GB free", planned.stdout)
    shared = check(role, models.senior, *on_gpu, "80GB", "compute.ranks_per_gpu=2")
    assert "40.000 GB free" in shared.stdout, shared.stderr
    refused = check(role, models.senior, *on_gpu, "100KB")
    assert refused.returncode == 2
    settings = {"rollout": "kv_cache_bytes"}.get(role, "batch.micro_batch_tokens")
    assert "of the GPU's memory" in refused.stderr and settings in refused.stderr


def test_lanes_have_shares_of_a_gpu_that_is_not_there(models):
    def planned(*settings):
        return check(
            "rollout", models.senior, f"junior_model={models.junior}", "max_num_seqs=65536",
            "compute.device=cuda", "--assume-gpu-memory", "10GB", *settings,
        )  # fmt: skip

    both = planned("senior_gpu_memory_utilization=0.6", "junior_gpu_memory_utilization=0.3")
    assert both.returncode == 0, both.stderr
    for lane, share in (("senior", 6), ("junior", 3)):
        said = f"the lane takes at most {share}.00 GB ({lane}.gpu_memory_utilization)"
        assert said in both.stdout
        # A pass of a tiny model has some 1 GB of activations and logits on a GPU.
        assert (share - 1.2) * 1e9 < needs(both, f"{lane}_kv_cache") < share * 1e9
    too_much = planned("senior_gpu_memory_utilization=0.6", "junior_gpu_memory_utilization=0.5")
    assert too_much.returncode == 2
    assert "junior_gpu_memory_utilization: is 0.5, with which the lanes on GPU 0" in too_much.stderr
    # A rank's part of the GPU.
    for fraction, code in ((0.4, 0), (0.6, 2)):
        shared = planned(f"senior_gpu_memory_utilization={fraction}", "compute.ranks_per_gpu=2")
        assert shared.returncode == code, shared.stderr
    assert "5.00 GB are available" in shared.stderr
    too_little = planned("senior_gpu_memory_utilization=0.001")
    assert too_little.returncode == 2
    assert "senior_gpu_memory_utilization: 0.001 of the GPU's memory is 0.01" in too_little.stderr


def test_the_server_info_has_the_absolute_path_of_the_model(models, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(models.senior)
    command = [find_binary("tandem-rollout-server"), "senior_model=models/../models/mine"]
    with subprocess.Popen(
        [*map(str, command), "server.grpc_port=0", "server.metrics_port=0"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            port = json.loads(server.stdout.readline())["grpc_port"]
            with RolloutClient(f"127.0.0.1:{port}") as client:
                assert client.info().server.model.path == str(tmp_path / "models" / "mine")
        finally:
            server.terminate()


@pytest.mark.parametrize("role", MODEL_FIELD)
def test_the_help_of_a_server_names_its_options_and_the_page_of_its_settings(role):
    command = [find_binary(f"tandem-{role}-server"), "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "--config" in said
    assert "docs/reference/configuration.md" in said


def test_a_family_that_is_not_supported_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 768}))
    refused = check("trainer", tmp_path)
    assert refused.returncode == 2
    assert "model_type: gpt2 is not supported" in refused.stderr


def needs(checked, item):
    """Bytes of an item of the memory requirement that `--check-config` prints."""
    gigabytes = re.search(rf"(?m)^# +([0-9.]+) GB  {item}\b", checked.stdout)[1]
    return float(gigabytes) * 1e9


@pytest.mark.parametrize("role", ["trainer", "critic"])
def test_recomputation_makes_room_for_more_tokens_in_a_micro_batch(models, role):
    full = "strategy.recompute_granularity=full"
    probe = 1_000_000
    kept, recomputed = (
        check(role, models.senior, f"batch.micro_batch_tokens={probe}", *how)
        for how in ([], [full])
    )
    # Recomputation holds the activations of one of the two layers.
    assert needs(recomputed, "activations") < 0.9 * needs(kept, "activations")
    # This many tokens need more memory than is available, unless layers are recomputed.
    ratio = needs(recomputed, "in all") / needs(kept, "in all")
    tokens = probe * needs(kept, "available") / needs(kept, "in all") / ratio**0.5
    batch = f"batch.micro_batch_tokens={int(tokens)}"
    refused = check(role, models.senior, batch)
    assert refused.returncode == 2
    assert "GB are available" in refused.stderr
    assert check(role, models.senior, batch, full).returncode == 0


def test_an_objective_is_checked_without_a_server(models):
    good = check("trainer", models.senior, "--check-objective", '{"clip_ratio_low": 0.125}')
    assert good.returncode == 0, good.stderr
    resolved = json.loads(good.stdout.splitlines()[-1])
    assert resolved["clip_ratio_low"] == 0.125
    assert resolved["clip_ratio_high"] == 0.2
    assert resolved["loss_kind"] == "POLICY_LOSS_KIND_PPO_CLIP"
    short = check("trainer", models.senior, "--check-objective", "loss_kind: cispo")
    assert json.loads(short.stdout.splitlines()[-1])["loss_kind"] == "POLICY_LOSS_KIND_CISPO"
    typo = check("trainer", models.senior, "--check-objective", '{"clip_ratio_lo": 0.1}')
    assert 'policy.clip_ratio_lo: unknown key; did you mean "clip_ratio_low"?' in typo.stderr
    lacks = check("trainer", models.senior, "--check-objective", '{"kl_coefficient": 0.1}')
    assert lacks.returncode == 2
    assert lacks.stderr.endswith(" [NO_REFERENCE_MODEL]\n")
    bad = check("trainer", models.senior, "--check-objective", '{"gae_gamma": 7}')
    assert bad.returncode == 2
    assert "policy.gae_gamma: must be in [0, 1], got 7" in bad.stderr
    lone = subprocess.run(
        [find_binary("tandem-trainer-server"), "--check-objective", "{}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert lone.returncode == 2
    assert "--check-config" in lone.stderr


def test_every_server_tells_the_vocabulary_of_its_model(models, tmp_path):
    tokenizer = Tokenizer.from_file(str(models.senior / "tokenizer.json"))
    entries = sorted((i, piece) for piece, i in tokenizer.get_vocab().items())
    text = "".join(f"{i} {piece}\n" for i, piece in entries)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    with harness.cluster(tmp_path, models, trainer={}, critic={}) as running:
        with harness.rollout_client(running) as rollout:
            info = rollout.info()
            assert info.server.model.vocabulary_digest == digest
            assert info.junior.vocabulary_digest == digest
        with harness.trainer_client(running) as trainer:
            assert trainer.info().server.model.vocabulary_digest == digest
        with harness.critic_client(running) as critic:
            assert critic.info().server.model.vocabulary_digest == digest


def test_loading_the_base_model_gives_a_trainer_its_first_state(fresh_pair):
    step = {"run_id": "r", "step": 0, "request_id": "0", "expected_version": 0}
    sample = [SupervisedSample([5, 6], [7, 8])]
    with harness.trainer_client(fresh_pair) as client:
        start = client.info()
        assert not start.unsaved
        assert start.max_samples == 4096
        first = client.train_step(sample, **step)
        assert client.info().unsaved
        assert client.load_base_model() == start.server.weights
        anew = client.info()
        assert (anew.optimizer_steps, anew.unsaved) == (0, False)
        again = client.train_step(sample, **step)
        assert not again.replayed
        assert again.report == first.report


def test_loading_the_base_model_gives_a_critic_its_first_state(models, tmp_path):
    numbers = {"old_values": to_tensor([0.0, 0.0]), "returns": to_tensor([1.0, 0.5])}
    sample = critic_pb2.ValueSample(prompt_token_ids=[5], response_token_ids=[7, 8], **numbers)
    header = critic_pb2.TrainStepHeader(run_id="r", request_id="0", num_samples=1)
    messages = [
        critic_pb2.TrainStepRequest(header=header),
        critic_pb2.TrainStepRequest(sample=sample),
    ]
    with (
        harness.cluster(tmp_path, models, rollouts=0, critic={}) as running,
        harness.critic_client(running) as client,
    ):
        start = client.info()
        first = client.send_train_step(messages)
        assert client.info().unsaved
        assert client.load_base_model() == start.server.weights
        assert client.send_train_step(messages) == first
