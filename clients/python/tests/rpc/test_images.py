"""Images of prompts: their pixels and tokens, and their way to servers and from data sets."""

import json
from concurrent import futures

import fakes
import grpc
import numpy as np
import pytest
from grpc_status import rpc_status
from PIL import Image, ImageFile
from pyarrow import Table, parquet

from tandem._proto.blobs.v1 import blobs_pb2, blobs_pb2_grpc
from tandem._proto.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem._proto.types.v1 import vision_pb2
from tandem.data.dataset import load_dataset
from tandem.errors import ConfigError, FailedPreconditionError, OutOfRangeError
from tandem.models.tokenizer import TextCodec
from tandem.rpc import images
from tandem.rpc.aio import AsyncTrainerClient
from tandem.rpc.client import TrainerClient
from tandem.rpc.images import FORMATS, ImageProcessor, VisionInput, images_of, pixels_of
from tandem.rpc.requests import SupervisedSample
from tandem.settings.run import DataSettings

IMAGE, VIDEO = 60, 61  # "w60" and "w61" of the tokenizer
TEMPLATE = """{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }} {% else %}\
{% for part in m['content'] %}{{ 'w60' if part['type'] == 'image' else part['text'] }} \
{% endfor %}{% endif %}{% endfor %}w63"""


def pixels(seed=0, grid=(1, 2, 4), **rest):
    values = np.random.default_rng(seed).standard_normal((int(np.prod(grid)), 12), np.float32)
    return VisionInput(values, grid, **rest)


@pytest.fixture
def model(tmp_path):
    """The directory of a model that takes images: a tokenizer, a template and a processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    directory = fakes.write_tokenizer(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=256, max_pixels=4096).save_pretrained(
        directory
    )
    return directory


def save_image(path, size=(16, 8), colour=(255, 0, 0)):
    Image.new("RGB", size, colour).save(path)
    return path


def test_an_input_has_the_digest_of_its_bytes_and_is_found_by_it():
    one, same, other = pixels(1), pixels(1), pixels(2)
    assert one.digest == same.digest != other.digest
    assert bytes(pixels_of(one.digest)) == one.pixels.tobytes()
    del same
    assert bytes(pixels_of(one.digest)) == one.pixels.tobytes(), "the other one has them"
    digest = other.digest
    del other
    assert pixels_of(digest) is None
    message = pixels(1, kind="video", seconds_per_grid=0.5).message()
    assert message == vision_pb2.VisionInput(
        kind=2, digest=one.digest, grid_t=1, grid_h=2, grid_w=4, seconds_per_grid=0.5
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((np.zeros((8, 3)), (1, 2, 3)), "pixels: .8, 3. are not 1 x 2 x 3 patches"),
        ((np.zeros(8), (1, 2, 4)), "pixels"),
        ((np.zeros((8, 3)), (1, 2, 4), "sound"), "kind: 'sound' is not one of image, video"),
    ],
)
def test_pixels_that_do_not_fit_are_refused(arguments, why):
    with pytest.raises(ConfigError, match=why):
        VisionInput(*arguments)


def test_the_processor_is_that_of_the_model(model, tmp_path):
    from transformers import AutoImageProcessor

    file = save_image(tmp_path / "red.png", (40, 24))
    with Image.open(file) as image:
        expected = AutoImageProcessor.from_pretrained(model)(images=[image], return_tensors="np")
        for given in (image, str(file), {"path": str(file)}, {"bytes": file.read_bytes()}):
            made = ImageProcessor(model).image(given)
            np.testing.assert_array_equal(made.pixels, expected["pixel_values"])
            assert made.grid == tuple(expected["image_grid_thw"][0])
    with pytest.raises(ConfigError, match=r"missing\.png is not a file"):
        ImageProcessor(model).image("missing.png", tmp_path)
    (tmp_path / "bad.png").write_text("no image")
    with pytest.raises(ConfigError, match="UnidentifiedImageError"):
        ImageProcessor(model).image(tmp_path / "bad.png")


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "BMP", "PPM", "ICO", "PDF"])
def test_formats_beyond_the_four_are_not_read(model, tmp_path, kind):
    file = tmp_path / "image.png"
    Image.new("RGB", (16, 16)).save(file, kind)
    with pytest.raises(ConfigError, match="UnidentifiedImageError") as caught:
        ImageProcessor(model).image(file)
    assert caught.value.hint == "PNG, JPEG, WEBP, GIF are read"


@pytest.mark.parametrize("kind", FORMATS)
def test_the_four_formats_are_read_whatever_the_name_says(model, tmp_path, kind):
    file = tmp_path / "image"
    Image.new("RGB", (16, 8)).save(file, kind)
    assert ImageProcessor(model).image(file).rows(2) == 6


def no_pixels(monkeypatch):
    """Makes the reading of pixels fail."""

    def load(self):
        raise AssertionError("pixels were read")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


def test_a_large_image_is_refused_by_its_header(model, tmp_path, monkeypatch):
    file = save_image(tmp_path / "large.png", (600, 500))
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 300_000)
    assert ImageProcessor(model).image(file).pixels.size
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 299_999)
    no_pixels(monkeypatch)
    with pytest.raises(ConfigError, match="has 600 x 500 pixels, at most 299,999 are read"):
        ImageProcessor(model).image(file)


def test_images_longer_than_a_model_are_refused_by_their_headers(model, tmp_path, monkeypatch):
    codec = TextCodec(model)
    files = [save_image(tmp_path / f"{i}.png", (40 * i, 24)) for i in range(1, 4)]
    content = [{"type": "image", "image": str(file)} for file in files]
    messages = [{"role": "user", "content": content}]
    ids, inputs = codec.chat_with_images(messages)
    assert codec.chat_with_images(messages, longest=len(ids))[0] == ids
    tokens = sum(one.rows(2) for one in inputs)
    no_pixels(monkeypatch)
    with pytest.raises(ConfigError, match=f"3 of them have {tokens} tokens.*leaves {tokens - 1}"):
        codec.chat_with_images(messages, longest=len(ids) - 1)


def test_every_image_gets_as_many_tokens_as_it_has_rows(model):
    processor = ImageProcessor(model)
    small, clip = pixels(1), pixels(2, (3, 2, 2), kind="video")
    assert processor.expand([5, IMAGE, 6, VIDEO], [small, clip]) == [
        5, IMAGE, IMAGE, 6, VIDEO, VIDEO, VIDEO,
    ]  # fmt: skip
    for ids, inputs, why in (
        ([IMAGE], [], "stands for an image, but there is none left"),
        ([IMAGE], [clip], "stands for an image, but a video comes next"),
        ([5], [small], "tokens for only 0 of 1"),
    ):
        with pytest.raises(ConfigError, match=why):
            processor.expand(ids, inputs)


def test_a_text_model_takes_no_images(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not accept images: it has no vision_config"):
        ImageProcessor(tmp_path)


def test_videos_are_not_processed():
    with pytest.raises(ConfigError, match="videos are not supported here"):
        images_of([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])


def test_rows_have_images_in_a_column_or_in_conversations(model, tmp_path):
    codec = TextCodec(model)
    save_image(tmp_path / "red.png")
    save_image(tmp_path / "blue.png", (16, 16), (0, 0, 255))
    rows = tmp_path / "rows.jsonl"
    content = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "w2"}]
    rows.write_text(
        json.dumps({"prompt": "w2", "picture": "red.png"}) + "\n"
        + json.dumps({"prompt": "w2", "picture": ["blue.png", "red.png"]}) + "\n"
    )  # fmt: skip
    settings = DataSettings(jsonl=rows, template="chat", images="picture")
    one, two = load_dataset(settings, codec).examples
    # 16 x 8 pixels are resized to 24 x 16, 6 x 4 patches, or 6 tokens.
    [red] = one.vision_inputs
    assert one.token_ids == [IMAGE] * red.rows(2) + [2, 63]
    assert [image.digest for image in two.vision_inputs][1] == red.digest
    assert one.row == {"prompt": "w2", "picture": ["red.png"]}
    assert one.keys.isdisjoint(two.keys)
    assert len(load_dataset(settings.model_copy(update={"unique": True}), codec)) == 2

    conversation = tmp_path / "conversation.jsonl"
    conversation.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    [same] = load_dataset(DataSettings(jsonl=conversation), codec).examples
    assert same.token_ids == one.token_ids
    assert same.vision_inputs[0].digest == red.digest
    # Records say where the images are, of columns and conversations alike.
    assert same.shown_row == {"images": ["red.png"]}
    assert one.shown_row == {"picture": ["red.png"]}

    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps({"prompt": "w2 w60", "picture": "red.png"}) + "\n")
    [written] = load_dataset(DataSettings(jsonl=raw, images="picture"), codec).examples
    assert written.token_ids == [2] + [IMAGE] * red.rows(2)

    table = Table.from_pylist(
        [{"prompt": "w2", "picture": {"bytes": (tmp_path / "red.png").read_bytes(), "path": "r"}}]
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    packed = settings.model_copy(update={"jsonl": None, "parquet": tmp_path / "rows.parquet"})
    [embedded] = load_dataset(packed, codec).examples
    assert embedded.vision_inputs[0].digest == red.digest
    assert embedded.row["picture"] == ["r"]


def test_bad_images_of_rows_are_named_with_their_row(model, tmp_path):
    codec = TextCodec(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "w2", "picture": "gone.png"}\n{"prompt": "w3"}\n')
    settings = DataSettings(jsonl=rows, template="chat", images="picture")
    with pytest.raises(ConfigError) as caught:
        load_dataset(settings, codec)
    assert "rows.jsonl:1" in str(caught.value) and "gone.png is not a file" in str(caught.value)
    assert "rows.jsonl:2: the row has no 'picture'" in str(caught.value)
    save_image(tmp_path / "gone.png")
    rows.write_text('{"prompt": "w2", "picture": "gone.png"}\n')
    cut = settings.model_copy(update={"max_prompt_tokens": 3, "too_long": "truncate_left"})
    with pytest.raises(ConfigError, match="the prompt has"):
        load_dataset(cut, codec)


class FakeTrainerWithBlobs(
    trainer_pb2_grpc.TrainerServiceServicer, blobs_pb2_grpc.BlobServiceServicer
):
    """Keeps blobs, and loses them all before the first `losses` calls."""

    def __init__(self):
        self.blobs, self.losses, self.uploads, self.largest = {}, 0, 0, 0

    def FindMissingBlobs(self, request, context):  # noqa: N802
        missing = [digest for digest in request.digests if digest not in self.blobs]
        return blobs_pb2.FindMissingBlobsResponse(missing=missing)

    def UploadBlob(self, requests, context):  # noqa: N802
        self.uploads += 1
        header = next(requests).header
        chunks = [request.chunk for request in requests]
        self.largest = max(self.largest, *map(len, chunks))
        self.blobs[header.digest] = b"".join(chunks)
        assert len(self.blobs[header.digest]) == header.total_bytes
        return blobs_pb2.UploadBlobResponse()

    def TrainStep(self, requests, context):  # noqa: N802
        samples = [one.supervised_sample for one in requests if one.HasField("supervised_sample")]
        if self.losses:
            self.losses -= 1
            self.blobs.clear()
        wanted = {image.digest for sample in samples for image in sample.vision_inputs}
        if wanted - self.blobs.keys():
            status = fakes.error_status(9, "missing", reason="BLOB_MISSING")
            context.abort_with_status(rpc_status.to_status(status))
        return trainer_pb2.TrainStepResponse()


@pytest.fixture
def trainer():
    """A client of a fake trainer, which it has as `fake`."""
    fake = FakeTrainerWithBlobs()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    # A method that a test replaces is found when it is called.
    fake_upload = fake.UploadBlob
    fake.UploadBlob = lambda *call: fake.upload(*call)
    fake.upload = fake_upload
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(fake, server)
    blobs_pb2_grpc.add_BlobServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with TrainerClient(f"127.0.0.1:{port}") as client:
        client.fake = fake
        yield client
    server.stop(None)


def train(trainer, *images):
    samples = [SupervisedSample([5], [6], [image]) for image in images]
    return trainer.train_step(samples, run_id="r", step=1, expected_version=0)


def test_pixels_are_uploaded_once_in_chunks(trainer):
    large = VisionInput(np.ones((4, 100_000), np.float32), (1, 2, 2))  # 1.6 MB
    small = pixels()
    for _ in range(2):
        train(trainer, small, large, small)
    assert trainer.fake.uploads == 2
    assert trainer.fake.blobs[large.digest] == large.pixels.tobytes()
    assert trainer.fake.largest == 1 << 20


def test_a_call_is_repeated_with_what_the_server_lost(trainer):
    image = pixels()
    trainer.fake.losses = 2
    train(trainer, image)
    assert trainer.fake.uploads == 3
    trainer.fake.losses = 3
    with pytest.raises(FailedPreconditionError):
        train(trainer, image)


async def test_an_upload_that_is_refused_early_has_its_status(trainer):
    """grpc.aio hides the status of a call that ends while the client writes, now and then."""

    def refuse(requests, context):
        next(requests)
        context.abort_with_status(rpc_status.to_status(fakes.error_status(11, "too large")))

    trainer.fake.upload = refuse
    large = VisionInput(np.ones((4, 500_000), np.float32), (1, 2, 2))  # 8 MB
    async with AsyncTrainerClient(trainer.address) as client:
        for _ in range(10):
            with pytest.raises(OutOfRangeError, match="too large"):
                await train(client, large)


def test_pixels_that_nobody_has_are_the_servers_error(trainer):
    unknown = vision_pb2.VisionInput(kind=1, digest="0" * 64, grid_t=1, grid_h=2, grid_w=2)
    with pytest.raises(FailedPreconditionError) as caught:
        train(trainer, unknown)
    assert caught.value.reason == "BLOB_MISSING"
    assert trainer.fake.uploads == 0
