"""A file system of fsspec in this process whose writes fail where a test tells them to."""

from typing import ClassVar

from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem


class FlakyFileSystem(MemoryFileSystem):
    protocol = "flaky"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    # Called with the name of every file that is to be written; raises to fail.
    before_write = staticmethod(lambda name: None)
    written: ClassVar = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("flaky://", "memory://"))

    def open(self, path, mode="rb", **options):
        if "w" in mode:
            FlakyFileSystem.before_write(path.rpartition("/")[2])
            FlakyFileSystem.written.append(path.lstrip("/"))
        return super().open(path, mode, **options)

    @classmethod
    def reset(cls):
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.written.clear()
        cls.before_write = staticmethod(lambda name: None)


register_implementation("flaky", FlakyFileSystem, clobber=True)
