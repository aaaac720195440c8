"""Prints the wheels, as NAME==VERSION, that the shared libraries of a folder were copied from.

python docker/wheel_libraries.py LIB_DIR

It runs in the virtual environment that the libraries come from.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path


def main(folder: Path) -> int:
    """Prints the list; returns 1 if no installed wheel has one of the libraries."""
    owners = {
        Path(file).name: f"{wheel.metadata['Name']}=={wheel.version}"
        for wheel in distributions()
        for file in wheel.files or ()
        if ".so" in Path(file).name
    }
    libraries = {path.name for path in folder.iterdir()}
    if unknown := libraries - owners.keys():
        print(f"{folder}: no installed wheel has {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    print("\n".join(sorted({owners[name] for name in libraries})))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
