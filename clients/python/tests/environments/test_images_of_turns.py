"""Images that an environment shows: in the prompt, in its turns, and in the record."""

import json

import fakes
import numpy as np
import pytest
from PIL import Image
from talking import SPECIAL, called, image_template, write_chat_tokenizer

from tandem._proto.rollout.v1 import rollout_pb2
from tandem.data.dataset import Example
from tandem.environments import live as live_of
from tandem.environments.contract import EnvironmentClass
from tandem.environments.episode import Episode, Rules
from tandem.environments.live import LiveEnvironment, Said
from tandem.environments.template import Turns
from tandem.environments.tool_calls import hermes
from tandem.models.tokenizer import TextCodec
from tandem.rpc.requests import Prompt
from tandem.settings.environment import EnvironmentSettings

# One of the tokenizer's special tokens stands for an image.
PAD = "<|python_tag|>"
PAD_ID = 256 + SPECIAL.index(PAD)
PARTS = image_template(PAD)
WALKS = '''
from PIL import Image

class Walk:
    """A place to look around."""

    def reset(self, start, **row):
        return [{"type": "text", "text": " See: "}, {"type": "image", "image": seen(start)}]

    def look(self, colour: int) -> list:
        """Shows what is there.

        Args:
            colour: a number.
        """
        return [{"type": "text", "text": "Here:"}, {"type": "image", "image": seen(colour)}]

    def picture(self) -> Image.Image:
        """Shows a picture."""
        return seen(7)

    def broken(self) -> list:
        """Shows what is no image."""
        return [{"type": "image", "image": "/nowhere.png"}]


def seen(colour):
    return Image.new("RGB", (16, 8 + 8 * (colour % 2)), (colour, 0, 0))
'''


@pytest.fixture
def codec(tmp_path):
    """A tokenizer with a processor, of a model that takes images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    directory = write_chat_tokenizer(tmp_path / "model", PARTS)
    config = {"image_token_id": PAD_ID, "video_token_id": 99999, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096)
    processor.save_pretrained(directory)
    return TextCodec(directory)


@pytest.fixture
def walk(tmp_path):
    """The environment's class and its settings."""
    (tmp_path / "env.py").write_text(WALKS)
    settings = EnvironmentSettings(**{"class": f"{tmp_path}/env.py:Walk"})
    return EnvironmentClass.load(settings), settings


def begun(codec, walk, images=()):
    """An episode, and its environment; `images` are those of its row."""
    environment, settings = walk
    kwargs = {"tools": environment.shown_tools}
    rules = Rules(settings, environment, codec, Turns(codec, kwargs), hermes, kwargs, 2048)
    content = [*({"type": "image", "image": one} for one in images), {"type": "text", "text": "Go"}]
    messages = [{"role": "user", "content": content if images else "Go"}]
    ids, inputs = codec.chat_with_images(messages, template_kwargs=kwargs)
    example = Example({"start": 3}, "Go", ids, "row 1", vision_inputs=inputs, messages=messages)
    request = Prompt(ids, sampling={"max_tokens": 200}, vision_inputs=inputs)
    episode = Episode((0, 0), example, request, 5, rules)
    live = LiveEnvironment(environment.make)
    episode.begin(live.reset({"start": 3}))
    return episode, live


def says(episode, text):
    """Lets the models write a turn."""
    request = episode.next_turn()
    ids = episode.rules.codec.encode(f"{text}<|im_end|>", special=False)
    message = request.message()
    assert isinstance(message, rollout_pb2.Prompt)
    turn = fakes.written(message, 0, 0, ids)
    turn.vision_inputs.extend(message.vision_inputs)
    turn.finish_reason = 1
    episode.wrote(turn)


def answer(episode, live, said=None):
    """Makes the calls of a turn."""
    while (call := episode.next_call()) is not None:
        made = said or live.tool(call.name, dict(episode.rules.environment.typed(call)))
        episode.answered(call, made)


def shown(episode):
    """The whole sequence, and where its images stand in it."""
    request = episode.next_turn()
    ids = [*request.token_ids, *request.response.token_ids]
    return ids, list(request.vision_inputs), len(request.token_ids)


def test_images_of_reset_and_of_tools_stand_where_their_tokens_are(codec, walk):
    episode, live = begun(codec, walk, images=[Image.new("RGB", (32, 16), (9, 9, 9))])
    says(episode, called("look", colour=2) + called("picture"))
    answer(episode, live)
    says(episode, called("look", colour=5))
    answer(episode, live)
    ids, images, prompt = shown(episode)
    text = "".join(codec.token_texts(ids))
    assert text.count("Here:" + PAD) == 2
    assert " See: " + PAD in "".join(codec.token_texts(ids[:prompt]))
    # Two of the prompt, three of turns: each run of tokens is one image's, in their order.
    assert [one.first_token is None for one in images] == [True, True, False, False, False]
    places = [i for i, token in enumerate(ids) if token == PAD_ID]
    expected = []
    for one in images:
        rows = one.rows(codec.images.merge_size)
        first = one.first_token if one.first_token is not None else places[len(expected)]
        expected += range(first, first + rows)
    assert places == expected
    for one, colour in zip(images[2:], (2, 7, 5), strict=True):
        size = (16, 8 + 8 * (colour % 2))
        same = codec.images.image(Image.new("RGB", size, (colour, 0, 0)))
        np.testing.assert_array_equal(one.pixels, same.pixels)
    assert list(episode.trajectory.vision_inputs) == [one.message() for one in images[:4]]


def test_a_record_shows_the_same_images_again(codec, walk):
    episode, live = begun(codec, walk)
    line = json.loads(json.dumps(live.tool("look", {"colour": 4}).record()))
    says(episode, called("look", colour=4))
    answer(episode, live)
    again, _ = begun(codec, walk)
    says(again, called("look", colour=4))
    answer(again, None, Said(**line))
    assert shown(again)[0] == shown(episode)[0]
    assert [one.digest for one in again.images] == [one.digest for one in episode.images]


def test_what_is_no_image_is_told_to_the_model(walk):
    live = LiveEnvironment(walk[0].make)
    live.reset({"start": 1})
    said = live.tool("broken", {})
    assert said.tool_failed
    assert said.content.startswith("Error: ConfigError: image: /nowhere.png is not a file")


def test_images_of_too_many_bytes_are_the_tools_failure(walk, monkeypatch):
    monkeypatch.setattr(live_of, "MOST_SHOWN", 10)
    live = LiveEnvironment(walk[0].make)
    with pytest.raises(ValueError, match=r"reset\(\) showed images of .* bytes, at most 10"):
        live.reset({"start": 1})


def test_a_text_that_names_an_images_token_fails_the_episode(codec, walk):
    episode, live = begun(codec, walk)
    says(episode, called("look", colour=4))
    with pytest.raises(Exception, match="stands for an image, but there is none left"):
        answer(episode, live, Said(f"a {PAD} that is no image"))


def test_a_model_without_a_tower_is_shown_nothing(tmp_path, walk):
    directory = write_chat_tokenizer(tmp_path / "text", PARTS)
    (directory / "config.json").write_text("{}")
    codec = TextCodec(directory)
    assert not codec.takes_images
    with pytest.raises(Exception, match="the model does not accept images"):
        begun(codec, walk)
