"""Comparing the weights of two model directories, and reading their sizes."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.models.files import difference, end_token_ids, max_positions


def write(directory, tensors):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def tensors():
    numbers = np.random.default_rng(0)
    return {
        "a": numbers.random((4, 3), np.float32),
        "b": numbers.random(5, np.float32),
        "none": np.zeros((0, 2), np.float32),
    }


def test_the_same_weights_in_two_places_do_not_differ(tmp_path, tensors):
    one, other = write(tmp_path / "one", tensors), write(tmp_path / "other", tensors)
    link = tmp_path / "link"
    link.symlink_to(one)
    assert difference(one, other) is None
    assert difference(one, link) is None


def test_a_difference_is_named(tmp_path, tensors):
    one = write(tmp_path / "one", tensors)
    changed = {**tensors, "b": tensors["b"] + 1}
    assert difference(one, write(tmp_path / "b", changed)) == "b differs"
    reshaped = {**tensors, "a": tensors["a"].T.copy()}
    said = difference(one, write(tmp_path / "a", reshaped))
    assert said == "a has the shapes [4, 3] and [3, 4]"
    more = write(tmp_path / "more", tensors | {"c": tensors["b"]})
    assert difference(one, more) == f"only {more} has c"
    # A file may hold a tied head or not.
    assert (
        difference(one, write(tmp_path / "head", tensors | {"lm_head.weight": tensors["a"]}))
        is None
    )


def test_what_cannot_be_compared_does_not_differ(tmp_path, tensors):
    one = write(tmp_path / "one", tensors)
    halves = {name: values.astype(np.float16) for name, values in tensors.items()}
    assert difference(one, write(tmp_path / "halves", halves)) is None
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    whole = (one / "model.safetensors").read_bytes()
    for content in (b"", b"x", whole[:20], whole[:-8]):
        (damaged / "model.safetensors").write_bytes(content)
        assert difference(one, damaged) is None
    assert difference(one, tmp_path / "nowhere") is None


def test_the_longest_sequence_is_that_of_the_config(tmp_path):
    assert max_positions(tmp_path) is None
    for content, limit in [({"max_position_embeddings": 512}, 512), ({}, None), ([], None)]:
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert max_positions(tmp_path) == limit


def test_the_longest_sequence_has_one_rotation(tmp_path):
    rope = {"type": "longrope", "short_factor": [1, 2], "original_max_position_embeddings": 64}
    config = {"max_position_embeddings": 512, "rope_scaling": rope}
    for change, outer, limit in [
        ({"long_factor": [1, 3]}, {}, 64),
        ({"long_factor": [1, 3]}, {"original_max_position_embeddings": 32}, 32),
        ({"type": "su", "long_factor": [1, 3]}, {}, 64),
        ({"long_factor": [1, 2]}, {}, 512),
        ({"type": "linear"}, {}, 512),
    ]:
        content = {**config, **outer, "rope_scaling": {**rope, **change}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert max_positions(tmp_path) == limit, content


def test_files_and_tensors_that_no_server_reads_do_not_differ(tmp_path, tensors):
    one, other = write(tmp_path / "one", tensors), write(tmp_path / "other", tensors)
    for name in ("consolidated", "adapter_model", "model-00001-of-00002"):
        save_file({"x": tensors["b"]}, other / f"{name}.safetensors")
    (other / "original").mkdir()
    save_file({"y": tensors["b"]}, other / "original" / "model.safetensors")
    assert difference(one, other) is None
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": tensors["b"]}
    assert difference(one, write(tmp_path / "old", tensors | old)) is None


def test_the_files_of_an_index_are_compared(tmp_path, tensors):
    one, other = write(tmp_path / "one", tensors), tmp_path / "other"
    other.mkdir()
    for name, values in tensors.items():
        save_file({name: values}, other / f"part-{name}.safetensors")
    save_file({"c": tensors["b"]}, other / "consolidated.safetensors")
    places = {name: f"part-{name}.safetensors" for name in tensors}
    index = other / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert difference(one, other) is None
    save_file({"a": tensors["a"] + 1}, other / "part-a.safetensors")
    assert difference(one, other) == "a differs"
    index.write_text("{")
    assert difference(one, other) is None


def test_the_sizes_of_a_model_with_images_are_those_of_its_text(tmp_path):
    text = {"max_position_embeddings": 256, "eos_token_id": [5, 7]}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": text, "vision_config": {"max_position_embeddings": 9}})
    )
    assert max_positions(tmp_path) == 256
    assert end_token_ids(tmp_path) == {5, 7}
    rope = {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}
    rope["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": text | {"rope_parameters": rope}, "eos_token_id": 9})
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert max_positions(tmp_path) == 64
    assert end_token_ids(tmp_path) == {1, 5, 7, 9}
    assert end_token_ids(tmp_path / "nowhere") == set()
