"""Checks the public contract in `proto/` against buf's rules and against the golden descriptor set.

    proto_contract.py lint      style rules of proto/buf.yaml
    proto_contract.py check     compatible with, and equal to, proto/golden/tandem.binpb
    proto_contract.py update    writes the golden set from the present protos; says what breaks

Everything runs on descriptor sets compiled here, so buf needs neither a network nor a registry:
`google/rpc` comes from the googleapis-common-protos wheel of the virtual environment.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO_ROOT = REPOSITORY / "proto"
GOLDEN = PROTO_ROOT / "golden" / "tandem.binpb"


class ContractError(Exception):
    """A violated rule; the message lists every finding."""


@dataclass(frozen=True)
class Contract:
    """A tree of protos, and the golden descriptor set that it is compared with."""

    proto_root: Path = PROTO_ROOT
    golden: Path = GOLDEN

    def compile(self, output: Path, *, source_info: bool) -> None:
        """Writes the descriptor set of `tandem/**/*.proto` with all imports to `output`."""
        files = sorted(
            str(p.relative_to(self.proto_root)) for p in self.proto_root.glob("tandem/**/*.proto")
        )
        if not files:
            raise ContractError(f"no protos below {self.proto_root}")
        purelib = Path(sysconfig.get_paths()["purelib"])
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I",
            str(self.proto_root),
            "-I",
            str(purelib),
        ]
        command += ["--include_imports", "-o", str(output)]
        if source_info:
            command.append("--include_source_info")
        result = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ContractError(result.stderr.strip())

    def _buf(self, *arguments: str) -> None:
        buf = Path(sys.executable).parent / "buf"
        config = str(PROTO_ROOT / "buf.yaml")
        command = [str(buf), *arguments, "--config", config]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ContractError((result.stdout + result.stderr).strip())

    def lint(self) -> None:
        """Raises ContractError if a proto breaks a style rule, a missing comment included."""
        with tempfile.TemporaryDirectory() as scratch:
            image = Path(scratch) / "tandem.binpb"
            self.compile(image, source_info=True)
            self._buf("lint", str(image), "--path", "tandem")

    def check_compatible(self) -> None:
        """Raises ContractError if clients built from the golden set could not talk to servers."""
        if not self.golden.exists():
            raise ContractError(f"{self.golden} is missing: run `make proto-golden`")
        with tempfile.TemporaryDirectory() as scratch:
            image = Path(scratch) / "tandem.binpb"
            self.compile(image, source_info=True)
            self._buf("breaking", str(image), "--against", str(self.golden))

    def check_current(self) -> None:
        """Raises ContractError unless the golden set holds exactly the present protos."""
        with tempfile.TemporaryDirectory() as scratch:
            image = Path(scratch) / "tandem.binpb"
            self.compile(image, source_info=False)
            if image.read_bytes() != self.golden.read_bytes():
                raise ContractError(
                    f"the protos differ from {self.golden.name} (a compatible change): "
                    "accept them with `make proto-golden` and commit the result"
                )

    def update(self) -> None:
        """Makes the present protos the golden set."""
        self.golden.parent.mkdir(parents=True, exist_ok=True)
        self.compile(self.golden, source_info=False)


def main(arguments: list[str]) -> int:
    """Runs one command of the module's docstring; returns the exit status."""
    contract = Contract()
    command = arguments[0] if len(arguments) == 1 else ""
    try:
        if command == "lint":
            contract.lint()
        elif command == "check":
            contract.check_compatible()
            contract.check_current()
        elif command == "update":
            try:
                contract.check_compatible()
            except ContractError as error:
                print(f"proto contract: this change is not compatible:\n{error}", file=sys.stderr)
            contract.update()
            print(f"proto contract: wrote {contract.golden.relative_to(REPOSITORY)}")
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except ContractError as error:
        print(f"proto contract: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
