"""Senior and junior of one server, each of a length, type and quantisation of its own."""

from __future__ import annotations

import shutil
import subprocess

import harness
import numpy as np
import pytest
from harness import TANDEM, prompts
from tandem.cluster.local import find_binary
from tandem.errors import OutOfRangeError, ServerStartError
from tandem.rpc.wire import enum_name, from_tensor

TEXT = list(range(5, 35))

# Settings of a lane, without its name, and the largest difference of a log-prob from float32, at
# least twice what was measured.
STORAGES = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.15),
    "int8": ({"quantization": "int8"}, 0.5),
    "int4": ({"quantization": "int4"}, 6.0),
}


def lane(name, settings):
    return {f"{name}_{key}": value for key, value in settings.items()}


def scores(client):
    """The log-probs of senior and junior for one text."""
    [scored] = client.score([(TEXT, 1)], junior=True).sequences
    return from_tensor(scored.senior_logprobs), from_tensor(scored.junior_logprobs)


def response(client, tandem):
    """The tokens and log-probs of one response, bit for bit."""
    [[trajectory]] = client.generate(prompts(1, tandem))
    return list(trajectory.response_token_ids), trajectory.author_logprobs.data


@pytest.mark.parametrize("storage", STORAGES)
def test_a_lane_is_stored_without_a_change_of_the_other(rollout, models, tmp_path, storage):
    settings, atol = STORAGES[storage]
    senior, junior = scores(rollout)
    solo = response(rollout, {"enabled": False})
    with (
        harness.cluster(tmp_path, models, rollout=lane("junior", settings)) as running,
        harness.rollout_client(running) as client,
    ):
        info = client.info()
        assert enum_name(info.server.model, "dtype") == "float32"
        assert enum_name(info.server.model, "quantization") == "none"
        assert enum_name(info.junior, "dtype") == settings.get("dtype", "float32")
        assert enum_name(info.junior, "quantization") == settings.get("quantization", "none")
        same, stored = scores(client)
        assert np.array_equal(same, senior)
        assert 0 < np.abs(stored - junior).max() < atol
        assert response(client, {"enabled": False}) == solo
        mixed = response(client, TANDEM["word"])
        assert response(client, TANDEM["word"]) == mixed


@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_trains_the_senior_that_is_served_so(models, tmp_path, storage):
    settings, _ = STORAGES[storage]
    section = lane("senior", settings)
    with harness.cluster(tmp_path / "cluster", models, rollout=section, trainer={}) as running:
        lines = []
        config = harness.run_settings(tmp_path, models, running, steps=2)
        harness.run_training(config, on_step=lines.append)
        with harness.rollout_client(running) as client:
            assert client.info().server.weights.version == 2
    assert [line["step"] for line in lines] == [1, 2]
    assert all(np.isfinite(line["loss/total"]) for line in lines)


def test_keys_and_values_in_bfloat16_serve_both_lanes(rollout, models, tmp_path):
    senior, junior = scores(rollout)
    with (
        harness.cluster(tmp_path, models, rollout={"kv_cache_dtype": "bfloat16"}) as running,
        harness.rollout_client(running) as client,
    ):
        info = client.info()
        assert enum_name(info.server.model, "dtype") == "float32"
        rounded = scores(client)
        for found, exact in zip(rounded, (senior, junior), strict=True):
            assert 0 < np.abs(found - exact).max() < 0.05
        mixed = response(client, TANDEM["word"])
        assert response(client, TANDEM["word"]) == mixed


def test_operations_of_aten_compute_each_lane_in_its_type(models, tmp_path):
    def section(**settings):
        return {"compute": {"num_threads": 1, "kernels": "aten"}} | settings

    found = []
    for number, settings in enumerate([{}, {"junior_dtype": "bfloat16"}]):
        with (
            harness.cluster(tmp_path / str(number), models, rollout=section(**settings)) as running,
            harness.rollout_client(running) as client,
        ):
            found.append(scores(client))
    (senior, junior), (same, halved) = found
    assert np.array_equal(same, senior)
    assert 0 < np.abs(halved - junior).max() < 0.4


def test_a_shorter_junior_bounds_the_requests_that_use_it(models, tmp_path):
    with (
        harness.cluster(tmp_path, models, rollout={"junior_max_model_len": 20}) as running,
        harness.rollout_client(running) as client,
    ):
        info = client.info()
        assert (info.server.model.max_model_len, info.junior.max_model_len) == (128, 20)
        sampling = {"max_tokens": 100, "ignore_eos": True}
        for tandem, length in ((TANDEM["word"], 20), ({"enabled": False}, 128)):
            [prompt] = prompts(1, tandem, sampling=sampling)
            [[trajectory]] = client.generate([prompt])
            room = length - len(prompt.token_ids)
            assert len(trajectory.response_token_ids) == min(100, room)
        with pytest.raises(OutOfRangeError, match=r"at most 20 \(junior\.max_model_len") as caught:
            client.score([(TEXT, 1)], junior=True)
        assert caught.value.field == "sequences[0].token_ids"
        client.score([(TEXT, 1)])


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["senior_quantization=int8", "compute.kernels=aten"], "senior_quantization: compute.kern"),
        (["junior_gpu_memory_utilization=0.5"], "junior_gpu_memory_utilization: does not apply"),
        (["senior_enforce_eager=false"], "senior_enforce_eager: false asks for captured CUDA"),
        ([f"senior_model_revision={COMMIT}"], f"is not the snapshot of {COMMIT}"),
        (["junior_model_revision=main"], "junior_model_revision: must be a commit"),
        (["senior.dtype=float16"], "senior.dtype: must be one of"),
        (["junior.max_model_len=1"], "junior.max_model_len: must be"),
        (["kv_cache_bytes=1000"], "kv_cache_bytes: holds 0 blocks of 64 tokens"),
        (["kv_cache_dtype=int8"], "kv_cache_dtype: "),
        (["frozen_dtype=bfloat16"], "frozen_dtype: unknown key; frozen_dtype is now junior_dtype"),
        (["tandem.prob_primary=0.5"], "prob_primary is now prob_senior"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(models, settings, said):
    checked = subprocess.run(
        [
            find_binary("tandem-rollout-server"),
            "--check-config",
            f"senior_model={models.senior}",
            f"junior_model={models.junior}",
            *settings,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 2
    assert said in checked.stderr


def test_a_snapshot_of_the_hub_is_served(models, tmp_path):
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / COMMIT
    shutil.copytree(models.junior, snapshot)
    section = {"junior_model": str(snapshot), "junior_model_revision": COMMIT}
    with (
        harness.cluster(tmp_path / "cluster", models, rollout=section) as running,
        harness.rollout_client(running) as client,
    ):
        assert client.info().junior.path == str(snapshot)


def test_an_old_name_in_a_cluster_file_names_the_new_one(models, tmp_path):
    with (
        pytest.raises(ServerStartError, match="frozen_model is now junior_model"),
        harness.cluster(tmp_path, models, rollout={"frozen_model": str(models.junior)}),
    ):
        pass
