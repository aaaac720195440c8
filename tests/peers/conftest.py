"""The batch and the servers of a comparison, once for every family; runs on OpenEnv's servers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import fakes
import guess_game
import peer_batch
import pytest
import tandem_side
import torch
import yaml
from commands import lines, tandem
from talking import chat_codec
from tandem_side import Comparison

# The models are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture(scope="session", params=peer_batch.FAMILIES)
def comparison(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Comparison]:
    """Models of one family, a batch, and Tandem's servers of these models."""
    directory = tmp_path_factory.mktemp(request.param)
    models = peer_batch.make_models(directory, request.param)
    with tandem_side.serve(models, directory) as tandem:
        yield Comparison(models, peer_batch.make_batch(models), tandem)


@pytest.fixture
def world():
    """The fake servers' state."""
    return fakes.FakeWorld()


@pytest.fixture
def codec(tmp_path):
    """A tokenizer that writes conversations."""
    return chat_codec(tmp_path / "talker")


@pytest.fixture
def run_on(world, codec, tmp_path, monkeypatch):
    """Trains on the environment at a URL, a step unless told otherwise.

    Returns the line of metrics of the last step, or the result of another command.
    """
    monkeypatch.setattr(fakes, "VOCABULARY", codec.vocabulary_size)
    world.max_model_len = world.junior_max_model_len = 2048
    with fakes.serve(world, str(tmp_path / "model")) as address:
        run_file = guess_game.write_run(tmp_path, address, codec.directory)

        def run_on(url, *overrides, command="train", check=0, **settings):
            config = yaml.safe_load(run_file.read_text())
            config["environment"] = {"openenv": {"url": url, **settings}}
            run_file.write_text(yaml.safe_dump(config))
            printed = tandem(command, run_file, "steps=1", *overrides, check=check)
            if check:
                return printed.stderr
            if command == "train":
                return lines(tmp_path / "run" / "metrics.jsonl")[-1]
            return json.loads(printed.stdout.splitlines()[-1])

        yield run_on


@pytest.fixture
def roomy(world, run_on):
    """Room for observations of many bytes, each of which is a token."""
    world.max_model_len = world.junior_max_model_len = 1 << 15
