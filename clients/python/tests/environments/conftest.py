"""Runs with an environment against fake servers."""

import fakes
import guess_game
import pytest
from talking import chat_codec


@pytest.fixture
def codec(tmp_path):
    """A tokenizer that writes conversations."""
    return chat_codec(tmp_path / "talker")


@pytest.fixture
def run_file(address, world, codec, tmp_path, monkeypatch):
    """A run whose rows are numbers to guess; the models write nothing until let_write()."""
    monkeypatch.setattr(fakes, "VOCABULARY", codec.vocabulary_size)
    world.max_model_len = world.junior_max_model_len = 2048
    return guess_game.write_run(tmp_path, address, codec.directory)
