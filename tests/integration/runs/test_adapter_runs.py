"""Runs that train low-rank adapters, from a run file to an export of the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
import yaml
from commands import tandem
from safetensors.torch import load_file
from tandem.settings import loading
from transformers import AutoModelForCausalLM

STEPS = 4
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture
def run_file(models, tmp_path) -> Path:
    """A run whose `cluster.lora` gives adapters to its trainer and its rollout server."""
    sections = harness.sections(models, trainer={"optimizer": {"learning_rate": 0.01}})
    # The model of the cluster, whose base is the junior too.
    for section, keys in (("rollout", ("senior_model", "junior_model")), ("trainer", ("model",))):
        for key in keys:
            del sections[section][key]
    cluster = {"directory": str(tmp_path / "cluster"), "model": str(models.senior), "lora": LORA}
    config = harness.run_settings(
        tmp_path, models, None, steps=STEPS, cluster=cluster | sections, checkpoint={"every": 2}
    )
    path = tmp_path / "run.yaml"
    path.write_text(loading.dump(config))
    assert yaml.safe_load(path.read_text())["cluster"]["lora"]["rank"] == 4
    return path


def test_a_run_trains_adapters_resumes_to_the_same_bits_and_exports_the_merged_model(
    models, run_file, tmp_path
):
    tandem("train", run_file, f"run_dir={tmp_path / 'whole'}")
    tandem("train", run_file, "steps=2")
    tandem("train", run_file, f"steps={STEPS}", "--resume")
    whole, parted = tmp_path / "whole", tmp_path / "run"
    lines = harness.metrics_without_clock(whole)
    assert harness.metrics_without_clock(parted) == lines
    assert [line["step/trained"] for line in lines] == [1] * STEPS
    for step in range(1, STEPS + 1):
        name = f"trajectories/step_{step}.parquet"
        assert (whole / name).read_bytes() == (parted / name).read_bytes()
    # The rollout server got what was trained: its tokens name the versions of the trainer.
    versions = {record["senior_versions"][0][0] for record in harness.trajectories(whole, STEPS)}
    assert versions == {STEPS - 1}

    saved, resumed = (
        one / json.loads((one / "state.json").read_text())["trainer"] for one in (whole, parted)
    )
    files = {one.name for one in saved.glob("*.safetensors")}
    assert "adapter_model.safetensors" in files
    assert not any(name.startswith("model") for name in files)
    for name in files:
        assert (saved / name).read_bytes() == (resumed / name).read_bytes()

    tandem("export", whole, tmp_path / "merged")
    _assert_merged(models.senior, saved, tmp_path / "merged")


def _assert_merged(base: Path, checkpoint: Path, merged: Path) -> None:
    """Fails unless the merged model is W + (alpha / rank) B A, in whole numbers of transformers."""
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    expected = dict(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict())
    matrices = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): value
        for name, value in adapter.items()
        if name.endswith(".lora_A.weight")
    }
    assert len(matrices) == 14  # seven maps in each of two layers
    for name, a in matrices.items():
        b = adapter[f"base_model.model.{name}.lora_B.weight"]
        assert b.abs().max() > 1e-3
        expected[f"{name}.weight"] = expected[f"{name}.weight"] + 2.0 * b @ a
    found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
