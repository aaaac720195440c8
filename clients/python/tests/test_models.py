"""The sources and destinations that `tandem model import` refuses."""

import json

import fakes
import pytest

from tandem.errors import ConfigError
from tandem.models import import_model


@pytest.fixture
def source(tmp_path):
    """A Hugging Face directory without weights."""
    directory = tmp_path / "source"
    directory.mkdir()
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_weights_that_are_damaged_are_refused(source, tmp_path):
    pytest.importorskip("transformers")
    fakes.write_tokenizer(source)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (source / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=f"^{source}: transformers cannot read it: Safetensor"):
        import_model(str(source), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_family_that_no_server_has_is_refused_before_its_weights_are_read(tmp_path):
    pytest.importorskip("transformers")
    source = tmp_path / "gpt2"
    source.mkdir()
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16}
    (source / "config.json").write_text(json.dumps(config))
    message = f"^{source}: model_type: gpt2 is not supported"
    with pytest.raises(ConfigError, match=message) as caught:
        import_model(str(source), tmp_path / "model")
    assert "llama" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


def test_a_source_that_is_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a Hugging Face directory"):
        import_model(str(tmp_path / "nothing"), tmp_path / "model")


def test_a_destination_that_is_a_file_is_refused(source, tmp_path):
    file = tmp_path / "model"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"^{file} exists$"):
        import_model(str(source), file)
    with pytest.raises(ConfigError, match=r": Not a directory$"):
        import_model(str(source), file / "below")


def test_a_destination_with_a_damaged_stamp_is_refused(source, tmp_path):
    destination = tmp_path / "model"
    destination.mkdir()
    (destination / "tandem_import.json").write_text("{")
    with pytest.raises(ConfigError, match=r" exists$"):
        import_model(str(source), destination)
