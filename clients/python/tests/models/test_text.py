"""Encoding and decoding of text, chat templates and stop texts."""

import json
import re
from pathlib import Path

import fakes
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tandem.errors import ConfigError
from tandem.models.tokenizer import MAX_STOP_TEXT_BYTES, MAX_STOP_TEXTS, GrowingText, TextCodec


@pytest.fixture
def directory(tmp_path):
    return fakes.write_tokenizer(tmp_path / "model")


@pytest.fixture
def codec(directory):
    return TextCodec(directory)


def test_token_texts_add_up_to_the_text(codec):
    ids = codec.encode("w1 w2 w3")
    assert "".join(codec.token_texts(ids)) == "w1w2w3"
    assert codec.eos_token_id == fakes.EOS


def test_a_character_of_several_tokens_shows_when_it_is_whole():
    whole = "aé"
    bytes_of = dict(enumerate(whole.encode()))
    growing = GrowingText(lambda ids: bytes(bytes_of[i] for i in ids).decode(errors="replace"))
    assert [growing.add(i) for i in bytes_of] == ["a", "", "é"]
    growing.add(1)
    assert growing.rest() == "\ufffd"


def test_the_tokens_of_a_long_text_are_decoded_from_the_last_ids_alone():
    most = 0

    def decode(ids):
        nonlocal most
        most = max(most, len(ids))
        return "".join(f"w{i}" for i in ids)

    growing = GrowingText(decode)
    assert [growing.add(i) for i in range(100)] == [f"w{i}" for i in range(100)]
    assert growing.rest() == ""
    assert most == 2


def test_the_text_of_a_token_depends_on_the_token_before_it():
    # Decoders of SentencePiece drop the space before the first word.
    growing = GrowingText(lambda ids: " ".join(f"w{i}" for i in ids))
    assert [growing.add(i) for i in (3, 3, 4)] == ["w3", " w3", " w4"]


def test_tokens_are_found_by_how_their_text_ends(codec):
    assert codec.ids_ending_with("w7") == [7]
    assert codec.ids_ending_with("7") == [7, 17, 27, 37, 47, 57]
    assert codec.ids_ending_with("w") == []
    # The name of a special token is not its text.
    assert codec.ids_ending_with(">") == []


def test_a_chat_template_writes_json_as_it_is(codec, monkeypatch):
    (codec.directory / "chat_template.jinja").write_text("{{ messages[0]['content'] | tojson }}")
    written = []
    monkeypatch.setattr(codec, "encode", lambda text, **_: written.append(text) or [])
    codec.chat([{"role": "user", "content": "a < b & 'ä'"}])
    # Jinja's own filter would escape <, & and ' for HTML, and ä for JSON.
    assert written == ["\"a < b & 'ä'\""]


def test_a_directory_without_a_chat_template_is_named(codec):
    (codec.directory / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=f"^tokenizer: {codec.directory} has no chat template"):
        codec.chat([{"role": "user", "content": "w1"}])


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no system turn') }}"])
def test_a_chat_template_that_fails_is_named(codec, template):
    (codec.directory / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=f"chat template of {codec.directory}"):
        codec.chat([{"role": "user", "content": "w1"}])


def test_content_that_the_template_cannot_write_is_named(codec):
    (codec.directory / "chat_template.jinja").write_text("{{ '>' + messages[0]['content'] }}")
    with pytest.raises(ConfigError, match=f"chat template of {codec.directory}: TypeError"):
        codec.chat([{"role": "user", "content": [{"type": "text", "text": "w1"}]}])


def test_a_stop_text_is_found_by_the_server_and_a_special_token_by_its_name(codec):
    assert codec.stops([], "stop") == {"stop_token_ids": [], "stop": []}
    assert codec.stops(["w5 w6", "<eos>", "\n"], "stop") == {
        "stop_token_ids": [0],
        "stop": ["w5 w6", "\n"],
    }


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([str(i) for i in range(17)], "has 17 texts; a server accepts at most 16"),
        (["x", "é" * 129], "has 258 bytes; a server accepts 1 to 256"),
        ([""], "has 0 bytes"),
        (["\ud800"], "is not Unicode text"),
    ],
)
def test_stop_texts_that_no_server_takes_are_refused(codec, texts, says):
    with pytest.raises(ConfigError, match=rf"^sampling\.stop: .*{says}"):
        codec.stops(texts, "sampling.stop")


def test_the_bounds_of_stop_texts_are_the_servers():
    code = (Path(__file__).resolve().parents[4] / "common/coauthoring/tandem_config.h").read_text()
    for name, bound in (("Texts", MAX_STOP_TEXTS), ("TextBytes", MAX_STOP_TEXT_BYTES)):
        assert re.findall(rf"kMaxStop{name} = (\d+);", code) == [str(bound)]


def test_half_a_character_is_named(codec):
    with pytest.raises(ConfigError, match=f"^tokenizer: {codec.directory}: .*not Unicode text"):
        codec.encode("w1 \ud800")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "EOF while parsing"),
        ("tokenizer_config.json", b"{", "not JSON"),
        ("tokenizer_config.json", b"\xff", "not UTF-8"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
    ],
)
def test_a_damaged_file_is_named(directory, name, content, message):
    (directory / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^tokenizer: {re.escape(str(directory / name))}: ") as e:
        TextCodec(directory)
    assert message in str(e.value)


def test_a_special_token_that_is_no_string_is_named(directory):
    (directory / "tokenizer_config.json").write_text('{"eos_token": 5}')
    with pytest.raises(ConfigError, match="eos_token is not a string"):
        _ = TextCodec(directory).eos_token_id


def write_config(directory, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"} | config))


def test_a_token_that_tokenizer_json_lacks_is_refused(directory, subtests):
    for file, content in [
        ("tokenizer_config.json", {"additional_special_tokens": ["<|x|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<|x|>"}}),
        ("tokenizer_config.json", {"bos_token": {"content": "<|x|>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"64": {"content": "<|x|>"}}}),
        ("special_tokens_map.json", {"eos_token": "<|x|>"}),
        ("added_tokens.json", {"<|x|>": 64}),
    ]:
        with subtests.test(file=file, content=content):
            (directory / file).write_text(json.dumps(content))
            with pytest.raises(
                ConfigError, match=r"lacks '<\|x\|>', which its other files name"
            ) as caught:
                TextCodec(directory)
            assert "tandem model import" in caught.value.hint


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": ["w5"]},
        {"added_tokens_decoder": {"5": {"content": "w5", "special": True}}},
        {"bos_token": "w5"},
    ],
)
def test_a_special_token_is_whole_wherever_a_text_has_it(directory, config):
    """Its text needs no space around it, and decode() leaves it out, as transformers does."""
    assert TextCodec(directory).encode("w5w6") == [1]
    write_config(directory, **config)
    codec = TextCodec(directory)
    assert codec.encode("w6w5w7") == [6, 5, 7]
    assert codec.decode([6, 5, 7]) == "w6w7"
    write_config(directory, tokenizer_class="PreTrainedTokenizerFast", **config)
    transformers = pytest.importorskip("transformers")
    wanted = transformers.AutoTokenizer.from_pretrained(directory)
    assert wanted("w6w5w7", add_special_tokens=False).input_ids == [6, 5, 7]


def test_the_tokens_around_a_text_are_those_of_transformers(directory, subtests):
    for single in [None, "$A", "w1 $A", "$A <eos>", "w1 $A w2 <eos>"]:
        for asked in [{}, {"add_bos_token": True, "add_eos_token": True}]:
            with subtests.test(asked=asked, single=single):
                transformers = pytest.importorskip("transformers")
                write_config(
                    directory, tokenizer_class="PreTrainedTokenizerFast", bos_token="w1", **asked
                )
                if single is not None:
                    file = str(directory / "tokenizer.json")
                    tokenizer = Tokenizer.from_file(file)
                    numbers = [("w1", 1), ("w2", 2), ("<eos>", 0)]
                    tokenizer.post_processor = TemplateProcessing(
                        single=single, special_tokens=numbers
                    )
                    tokenizer.save(file)
                wanted = transformers.AutoTokenizer.from_pretrained(directory)("w5 w6").input_ids
                codec = TextCodec(directory)
                assert codec.encode("w5 w6") == wanted
                assert [*codec.frame.before, 5, 6, *codec.frame.after] == wanted


def test_ids_of_added_tokens_are_those_of_the_tokenizers_library(directory):
    """A hole in their numbers closes: the vocabulary's digest is that of the servers."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    for number, text in ((70, "<a>"), (90, "<b>")):
        content["added_tokens"].append(content["added_tokens"][0] | {"id": number, "content": text})
    file.write_text(json.dumps(content))
    codec = TextCodec(directory)
    assert codec.encode("w5 <a> <b>") == [5, 64, 65]
    assert codec.vocabulary_size == 66


def test_a_last_turn_of_the_assistants_is_continued(codec):
    (codec.directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }} <eos>{% endfor %}"
        "{% if add_generation_prompt %}{{ start }}{% endif %}"
    )
    asked = {"role": "user", "content": "w8"}
    assert codec.chat([asked], {"start": "w7"}) == [8, 0, 7]
    assert codec.chat([asked, {"role": "assistant", "content": "w9"}]) == [8, 0, 9]
