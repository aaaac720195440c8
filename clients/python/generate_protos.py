"""Generates the Python modules of proto/ into clients/python/tandem/_proto/<area>/v1.

Run it after a change of the contract: `python clients/python/generate_protos.py`. It does nothing
when the output is newer than every input, so that set-up can call it each time.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

CLIENT = Path(__file__).resolve().parent
PROTO = CLIENT.parents[1] / "proto"
OUTPUT = CLIENT / "tandem" / "_proto"

# protoc names modules after the files of the contract: tandem.types.v1 is tandem._proto.types.v1.
_IMPORT = re.compile(r"^from tandem\.", re.MULTILINE)
_MODULE_NAME = re.compile(r"'tandem\.([\w.]+_pb2)'")


def main() -> int:
    """Runs protoc when something changed."""
    sources = sorted(PROTO.glob("tandem/*/v1/*.proto"))
    outputs = [
        (OUTPUT / source.relative_to(PROTO / "tandem")).parent / f"{source.stem}_pb2{suffix}"
        for source in sources
        for suffix in (".py", ".pyi", "_grpc.py")
    ]
    newest = max(path.stat().st_mtime for path in [*sources, Path(__file__)])
    if all(path.exists() and path.stat().st_mtime >= newest for path in outputs):
        print(f"Python protos: {len(sources)} files, up to date")
        return 0

    import google.rpc
    from grpc_tools import protoc

    google_rpc = Path(next(iter(google.rpc.__path__))).parents[1]
    well_known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        status = protoc.main(
            [
                "protoc",
                f"-I{PROTO}",
                f"-I{google_rpc}",
                f"-I{well_known}",
                f"--python_out={folder}",
                f"--pyi_out={folder}",
                f"--grpc_python_out={folder}",
                *map(str, sources),
            ]
        )
        if status != 0:
            print(f"Python protos: {len(sources)} files FAILED")
            return status
        for output in outputs:
            generated = Path(folder, "tandem", output.relative_to(OUTPUT)).read_text()
            moved = _IMPORT.sub("from tandem._proto.", generated)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(_MODULE_NAME.sub(r"'tandem._proto.\1'", moved))
    print(f"Python protos: {len(sources)} files generated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
