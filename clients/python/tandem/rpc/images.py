"""Images and videos: their pixels, and the model's own processor that makes them."""

from __future__ import annotations

import hashlib
import io
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tandem._proto.types.v1 import vision_pb2
from tandem.errors import ConfigError
from tandem.utils.text_files import json_object, read_text

# Reason of a call that names pixels which the server does not hold.
BLOB_MISSING = "BLOB_MISSING"

_KINDS = {"image": vision_pb2.VISION_KIND_IMAGE, "video": vision_pb2.VISION_KIND_VIDEO}

_ONE = {"image": "an image", "video": "a video"}

# The formats that are read. Pillow knows others, and hands some (EPS) to programs of the machine.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Most pixels of an image as its file has it: one of 50 megapixels takes half a gigabyte.
MAX_IMAGE_PIXELS = 50_000_000


@dataclass(frozen=True, eq=False)
class VisionInput:
    """The pixels of one image or video.

    Requests name them by digest; the clients upload what a server lacks. The pixels of a
    trajectory's prompt are found by their digest while something in the process refers to the
    VisionInput that has them.

    Attributes:
        pixels: float32 [patches, values of a patch], as the image processor of `transformers` gives
            them (`pixel_values`, `pixel_values_videos`).
        grid: numbers of patches in time, height and width; their product is that of the patches.
        kind: "image" or "video".
        seconds_per_grid: seconds from one patch in time to the next, for videos.
        first_token: the index of its first token in prompt and response, for an image of an
            environment's turn; None for one of the prompt.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]
    kind: str = "image"
    seconds_per_grid: float = 1.0
    first_token: int | None = None
    _digest: str = field(init=False, repr=False)
    _shared: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pixels = np.ascontiguousarray(self.pixels, "<f4")
        time, height, width = (int(size) for size in self.grid)
        if self.kind not in _KINDS:
            raise ConfigError(f"kind: {self.kind!r} is not one of {', '.join(_KINDS)}")
        if pixels.ndim != 2 or len(pixels) != time * height * width:
            raise ConfigError(
                f"pixels: {list(pixels.shape)} are not {time} x {height} x {width} patches"
            )
        digest = hashlib.sha256(pixels.data).hexdigest()
        # Inputs with the same bytes share them, so that the last one keeps them known.
        shared = _known.setdefault(digest, pixels.reshape(-1))
        object.__setattr__(self, "_shared", shared)
        object.__setattr__(self, "_digest", digest)
        object.__setattr__(self, "pixels", shared.reshape(pixels.shape))
        object.__setattr__(self, "grid", (time, height, width))

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes of the pixels, 64 hexadecimal digits."""
        return self._digest

    def placed_at(self, first_token: int) -> VisionInput:
        """Returns this image with the index of its first token; its pixels are not read again."""
        placed = copy(self)
        object.__setattr__(placed, "first_token", first_token)
        return placed

    def rows(self, merge_size: int) -> int:
        """Returns the number of tokens that stand for it, given the model's spatial_merge_size."""
        time, height, width = self.grid
        return time * height * width // merge_size**2

    def message(self) -> vision_pb2.VisionInput:
        """Returns the message of the contract."""
        time, height, width = self.grid
        return vision_pb2.VisionInput(
            kind=_KINDS[self.kind],
            digest=self.digest,
            grid_t=time,
            grid_h=height,
            grid_w=width,
            seconds_per_grid=self.seconds_per_grid,
            first_token=self.first_token,
        )


# The pixels of every VisionInput of the process that something refers to, by digest.
_known: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()

# The images of a request: those, or the messages of a trajectory.
VisionInputs = Iterable[VisionInput | vision_pb2.VisionInput]


def messages(inputs: VisionInputs) -> list[vision_pb2.VisionInput]:
    """Returns the messages of images."""
    return [one.message() if isinstance(one, VisionInput) else one for one in inputs]


def pixels_of(digest: str) -> memoryview | None:
    """Returns the bytes of the pixels with that digest; None if the process has none."""
    known = _known.get(digest)
    return None if known is None else known.data.cast("B")


def accepts_images(directory: Path) -> bool:
    """Returns whether the model of a Hugging Face directory accepts images.

    False without a config.json; raises ConfigError for one that is damaged.
    """
    if not (directory / "config.json").is_file():
        return False
    _, config = _config_of(directory)
    return isinstance(config.get("vision_config"), dict)


def _config_of(directory: Path) -> tuple[str, dict[str, Any]]:
    """Returns the config.json of a model, behind the place that errors name."""
    file = directory / "config.json"
    place = f"model: {file}"
    return place, json_object(read_text(file, place), place)


class ImageProcessor:
    """The image processor of a Hugging Face directory, and the tokens that stand for images.

    Raises ConfigError, which names the directory, for a model that does not accept images, and for
    files that are damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        place, config = _config_of(directory)
        vision = config.get("vision_config")
        if not isinstance(vision, dict):
            raise ConfigError(f"{place}: the model does not accept images: it has no vision_config")
        self.merge_size = int(vision.get("spatial_merge_size", 2))
        # The defaults of transformers, for files that leave them out.
        self.image_token_id = int(config.get("image_token_id", 151655))
        self.video_token_id = int(config.get("video_token_id", 151656))

    def image(self, image: Any, folder: str | Path = "") -> VisionInput:
        """Returns the pixels of an image: a PIL image, a path, or a mapping with `bytes` or `path`.

        A mapping is what Parquet files of the Hugging Face Hub have as an image. A relative path
        begins at `folder`.
        """
        with _reading(image, folder) as opened:
            values = self._processor(images=[opened.convert("RGB")], return_tensors="np")
        return VisionInput(values["pixel_values"], tuple(values["image_grid_thw"][0]))

    def images(
        self, images: Sequence[Any], folder: str | Path = "", most_tokens: int | None = None
    ) -> list[VisionInput]:
        """Returns the pixels of images, as image() does.

        Raises ConfigError, before any pixels are read, for images that have more than `most_tokens`
        tokens in total.
        """
        if most_tokens is not None and images:
            tokens = sum(self._tokens_of(image, folder) for image in images)
            if tokens > most_tokens:
                raise ConfigError(
                    f"images: {len(images)} of them have {tokens:,} tokens, but the model's "
                    f"length leaves {max(0, most_tokens):,}"
                )
        return [self.image(image, folder) for image in images]

    def _tokens_of(self, image: Any, folder: str | Path) -> int:
        """Returns the number of an image's tokens, by the size in its header."""
        with _reading(image, folder) as opened:
            patches = self._processor.get_number_of_image_patches(opened.height, opened.width)
        return patches // self.merge_size**2

    def expand(self, ids: Sequence[int], inputs: Sequence[VisionInput]) -> list[int]:
        """Returns the ids with each image's one token repeated for every row of the image.

        Raises ConfigError unless there is one such token for each image.
        """
        left = list(inputs)
        expanded: list[int] = []
        for token in ids:
            if token not in (self.image_token_id, self.video_token_id):
                expanded.append(token)
                continue
            kind = "image" if token == self.image_token_id else "video"
            if not left or left[0].kind != kind:
                raise ConfigError(
                    f"images: token {len(expanded)} of the prompt stands for {_ONE[kind]}, but "
                    + (f"{_ONE[left[0].kind]} comes next" if left else "there is none left")
                )
            expanded += [token] * left.pop(0).rows(self.merge_size)
        if left:
            raise ConfigError(
                f"images: the prompt has tokens for only {len(inputs) - len(left)} of "
                f"{len(inputs)}",
                hint="the chat template writes them, or a raw prompt contains them",
            )
        return expanded

    def placed(
        self, ids: Sequence[int], inputs: Sequence[VisionInput], start: int
    ) -> list[VisionInput]:
        """Returns images with their places in expanded ids, the first of which is token `start`."""
        found = []
        place = 0
        for one in inputs:
            while ids[place] not in (self.image_token_id, self.video_token_id):
                place += 1
            found.append(one.placed_at(start + place))
            place += one.rows(self.merge_size)
        return found

    @cached_property
    def _processor(self) -> Any:
        # The import takes a second, and text does not need it.
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self.directory, local_files_only=True)


def content_of(images: Iterable[Any], text: str) -> str | list[dict[str, Any]]:
    """Returns the content of a message that shows images before its text; the text if none."""
    parts = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}] if parts else text


def images_of(conversation: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the images of a conversation's contents, in their order.

    Raises ConfigError for a video, which needs a VisionInput of its own.
    """
    images = []
    for message in conversation:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type")
            if kind == "image":
                images.append(part["image"])
            elif kind == "video":
                raise ConfigError(
                    "messages: videos are not supported here",
                    hint='make a VisionInput(kind="video") of `pixel_values_videos`',
                )
    return images


def png_of(image: Any) -> bytes:
    """Returns an image, as ImageProcessor.image() takes it, as the bytes of a PNG file in RGB."""
    file = io.BytesIO()
    with _reading(image, "") as opened:
        opened.convert("RGB").save(file, "PNG")
    return file.getvalue()


@contextmanager
def _reading(image: Any, folder: str | Path) -> Iterator[Any]:
    """Gives a PIL image, of which the header alone has been read if it is a file's.

    Raises ConfigError for what cannot be read.
    """
    from PIL import Image

    try:
        if isinstance(image, Mapping):
            image = io.BytesIO(image["bytes"]) if image.get("bytes") else image["path"]
        if isinstance(image, str | Path):
            image = Path(folder) / image
            if not image.is_file():
                raise ConfigError(f"image: {image} is not a file")
        if not isinstance(image, Path | io.BytesIO):
            yield image
            return
        with warnings.catch_warnings():
            # Pillow's warning of large images; the bound here is below it.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(image, formats=FORMATS)
        with opened:
            if opened.width * opened.height > MAX_IMAGE_PIXELS:
                raise ConfigError(
                    f"image: has {opened.width:,} x {opened.height:,} pixels, at most "
                    f"{MAX_IMAGE_PIXELS:,} are read"
                )
            yield opened
    except ConfigError:
        raise
    # Readers of images and processors may raise anything.
    except Exception as error:
        raise ConfigError(
            f"image: {type(error).__name__}: {error}", hint=f"{', '.join(FORMATS)} are read"
        ) from None
