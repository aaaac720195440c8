"""Generates the Python modules of proto/ into clients/python/tandem/<area>/v1.

Run it after a change of the contract: `python clients/python/generate_protos.py`. It does nothing
when the output is newer than every input, so that set-up can call it each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parent
PROTO = CLIENT.parents[1] / "proto"


def main() -> int:
    """Runs protoc when something changed."""
    sources = sorted(PROTO.glob("tandem/*/v1/*.proto"))
    outputs = [
        CLIENT / source.relative_to(PROTO).parent / f"{source.stem}_pb2{suffix}"
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
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO}",
            f"-I{google_rpc}",
            f"-I{well_known}",
            f"--python_out={CLIENT}",
            f"--pyi_out={CLIENT}",
            f"--grpc_python_out={CLIENT}",
            *map(str, sources),
        ]
    )
    print(f"Python protos: {len(sources)} files {'generated' if status == 0 else 'FAILED'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
