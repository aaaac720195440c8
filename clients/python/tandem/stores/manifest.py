"""The manifest of a checkpoint, as the servers write it: names, sizes and digests of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import xxhash
from pydantic import BaseModel, ValidationError

from tandem.errors import ConfigError
from tandem.stores.store import Store, StoredFile
from tandem.utils.byte_progress import ByteCount

# The file that a server writes last into a checkpoint.
MANIFEST = "manifest.json"
# A file that every checkpoint has, and no other directory of a model.
TRAINING_STATE = "tandem_state.json"


class ManifestFile(BaseModel):
    """A file of a checkpoint: its name, relative to the directory, its size and its digest."""

    name: str
    bytes: int
    xxh3_128: str

    def damage(self, store: Store, count: ByteCount | None = None) -> str | None:
        """Reads the file in a store; returns how it differs from the manifest, in words."""
        digest, size = xxhash.xxh3_128(), 0
        for block in store.blocks(self.name):
            digest.update(block)
            size += len(block)
            if count is not None:
                count.add(len(block))
        if size != self.bytes:
            return f"{self.name} has {size} bytes, the manifest says {self.bytes}"
        if digest.hexdigest() != self.xxh3_128:
            return f"the digest of {self.name} differs from the manifest's: the file is damaged"
        return None


class Manifest(BaseModel):
    """The contents of a manifest.json.

    Attributes:
        kind: "trainer" or "critic".
        step: the version of the weights.
        name: of the directory that the server wrote; empty in manifests of earlier releases.
        run_id: the run that the weights are from; empty before its first step.
        files: all files but the manifest itself.
    """

    kind: str
    step: int
    name: str = ""
    run_id: str = ""
    files: list[ManifestFile]

    @classmethod
    def parse(cls, text: bytes, place: str) -> Manifest:
        """Reads the text of a manifest. Raises ConfigError, beginning with `place`."""
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or value.get("format") != "tandem-checkpoint":
                raise ConfigError(f"{place}: is not the manifest of a checkpoint")
            return cls.model_validate(value)
        except (ValueError, ValidationError) as error:
            if isinstance(error, ValidationError):
                [problem, *_] = error.errors()
                field = ".".join(map(str, problem["loc"]))
                raise ConfigError(f"{place}: {field}: {problem['msg']}") from None
            raise ConfigError(f"{place}: is not JSON: {error}") from None

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)

    def problems(self, there: Mapping[str, StoredFile]) -> Iterator[str]:
        """Yields how the files of a directory differ from the manifest by names and sizes."""
        listed = {file.name: file for file in self.files}
        for name, file in listed.items():
            if name not in there:
                yield f"{name} is missing"
            elif there[name].size != file.bytes:
                yield f"{name} has {there[name].size} bytes, the manifest says {file.bytes}"
        for name in there.keys() - listed.keys() - {MANIFEST}:
            yield f"{name} does not belong to the checkpoint"
