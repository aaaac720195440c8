"""Checks that the arrows between folders go one way.

Three rules over the C++ sources and one over every text file of the repository:

1. A file includes headers of its own layer and of the layers that `LAYERS` allows; a test beside a
   server, or what is in its folder testing, may also include another server, or the other half of
   its own.
2. No file reaches both torch and gRPC headers, not even through our own headers.
3. An engine reaches no gRPC header, a service no torch header.
4. No file names a path of one particular machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# The layers that a layer may include besides itself. `proto` is the generated code of proto/tandem
# and google/rpc. The table is transitively closed on purpose: a reader sees every arrow at once.
LAYERS: dict[str, set[str]] = {
    "common/base": set(),
    "common/tensor": {"common/base"},
    "common/weights": {"common/base", "common/tensor"},
    "common/kernels": {"common/base", "common/tensor"},
    "common/coauthoring": {"common/base", "common/tensor", "common/weights", "common/kernels"},
    "common/ops": {"common/base", "common/tensor", "common/kernels"},
    "common/model": {
        "common/base",
        "common/tensor",
        "common/weights",
        "common/kernels",
        "common/ops",
    },
    "common/loss": {"common/base", "common/tensor", "common/kernels", "common/ops"},
    "common/speculator": {
        "common/base",
        "common/tensor",
        "common/weights",
        "common/kernels",
        "common/ops",
        "common/model",
        "common/loss",
    },
    "common/checkpoint": {"common/base", "common/tensor"},
    "common/optim": {"common/base", "common/tensor"},
    "common/steps": {"common/base", "common/tensor", "common/weights", "common/optim"},
    "common/ranks": {"common/base", "common/tensor", "common/ops"},
    "common/parallel": {
        "common/base",
        "common/tensor",
        "common/weights",
        "common/ranks",
        "common/kernels",
        "common/ops",
        "common/loss",
        "common/model",
        "common/optim",
        "common/steps",
    },
    "common/config": {
        "common/base",
        "common/tensor",
        "common/kernels",
        "common/coauthoring",
        "common/parallel",
        "proto",
    },
    # Converts between messages and the plain structs of these layers; rule 2 keeps torch out.
    "common/rpc": {
        "common/base",
        "common/config",
        "common/tensor",
        "common/weights",
        "common/kernels",
        "common/coauthoring",
        "common/model",
        "proto",
    },
}
_COMMON = {name for name in LAYERS if name.startswith("common/")}
# The halves of engines and services that trainer and critic share.
LAYERS["services/training_core"] = _COMMON - {"common/rpc", "common/config"}
LAYERS["services/training_core/service"] = {"services/training_core", *_COMMON, "proto"}
_TRAINING = {"services/training_core", "services/training_core/service"}
for _server in ("rollout", "trainer", "critic"):
    _engine, _service = f"services/{_server}/engine", f"services/{_server}/service"
    LAYERS[_engine] = (_COMMON - {"common/rpc", "common/config"}) | {"services/training_core"}
    LAYERS[_service] = {_engine, *_TRAINING, *_COMMON, "proto"}
    LAYERS[f"services/{_server}"] = {_engine, _service, *_COMMON, "proto"}
# A rollout server has ranks but does not train.
LAYERS["services/rollout/engine"] -= {
    "common/parallel",
    "common/optim",
    "common/steps",
    "services/training_core",
}

SOURCE_FOLDERS = ("common", "services")
SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10)/")
GRPC_HEADER = re.compile(r"^(grpc|grpcpp|grpc\+\+)/|\.grpc\.pb\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
# Split in two so that this file passes its own rule.
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:wor" + r"k|home|root|Users)/[\w.-]+")
MACHINE_PATH_EXEMPT = ("docker/", "deploy/")


@dataclass(frozen=True)
class Finding:
    """One broken rule at one place."""

    file: str
    message: str

    def __str__(self) -> str:
        """Returns `file: message`."""
        return f"{self.file}: {self.message}"


def layer_of(path: str) -> str | None:
    """Names the layer of a source file or an include path; None if it is not of this project."""
    if path.startswith(("tandem/", "google/rpc/")):
        return "proto"
    return max((name for name in LAYERS if path.startswith(name + "/")), key=len, default=None)


def is_server_test(path: str) -> bool:
    """Whether the file is a test beside a server, or for such tests."""
    return path.startswith("services/") and (path.endswith("_test.cc") or "/testing/" in path)


@dataclass
class SourceTree:
    """The C++ sources below a root, and their includes."""

    root: Path

    @cached_property
    def includes(self) -> dict[str, list[str]]:
        """Include directives of every source file, by path from the root."""
        result: dict[str, list[str]] = {}
        for folder in SOURCE_FOLDERS:
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in SOURCE_SUFFIXES and path.is_file():
                    name = path.relative_to(self.root).as_posix()
                    result[name] = INCLUDE.findall(path.read_text(encoding="utf-8"))
        return result

    def own_headers(self, file: str) -> list[str]:
        """`file` and the headers of the repository that it includes, directly or not."""
        reached, pending = [file], [file]
        while pending:
            for header in self.includes.get(pending.pop(), ()):
                if header in self.includes and header not in reached:
                    reached.append(header)
                    pending.append(header)
        return reached

    def reached(self, file: str) -> dict[str, str]:
        """Maps every foreign header that own_headers(file) include to the first file that does."""
        found: dict[str, str] = {}
        for own in self.own_headers(file):
            for header in self.includes.get(own, ()):
                if header not in self.includes:
                    found.setdefault(header, own)
        return found

    def check_arrows(self) -> list[Finding]:
        """Checks rule 1."""
        findings = []
        for file, headers in self.includes.items():
            layer = layer_of(file)
            if layer is None:
                findings.append(Finding(file, "is in no layer of tests/lint/check_layers.py"))
                continue
            for header in headers:
                target = layer_of(header)
                if header in self.includes and target is None:
                    findings.append(Finding(file, f"includes {header}, which is in no layer"))
                elif is_server_test(file) and target and target.startswith("services/"):
                    continue
                elif target not in (None, layer) and target not in LAYERS[layer]:
                    findings.append(Finding(file, f"{layer} may not include {header} ({target})"))
        return findings

    def check_torch_and_grpc(self) -> list[Finding]:
        """Checks rules 2 and 3."""
        findings = []
        for file in self.includes:
            reached = self.reached(file)
            torch = next((h for h in reached if TORCH_HEADER.search(h)), None)
            grpc = next((h for h in reached if GRPC_HEADER.search(h)), None)

            def through(header: str, reached: dict[str, str] = reached, file: str = file) -> str:
                return header if reached[header] == file else f"{header} (by {reached[header]})"

            if torch and grpc:
                message = f"mixes torch and gRPC: {through(torch)}, {through(grpc)}"
                findings.append(Finding(file, message))
            elif grpc and re.match(r"services/\w+/engine/", file):
                findings.append(Finding(file, f"an engine knows no gRPC: {through(grpc)}"))
            elif torch and re.match(r"services/\w+/service/", file):
                findings.append(Finding(file, f"a service knows no torch: {through(torch)}"))
        return findings


def check_machine_paths(root: Path, files: list[str]) -> list[Finding]:
    """Checks rule 4 over the given files."""
    findings = []
    for name in files:
        path = root / name
        if name.startswith(MACHINE_PATH_EXEMPT) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            for match in MACHINE_PATH.finditer(line):
                findings.append(Finding(f"{name}:{number}", f"machine path {match.group()}"))
    return findings


def repository_files(root: Path) -> list[str]:
    """Files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
    return [name for name in listing.stdout.split("\0") if name]


def main() -> int:
    """Prints every finding; returns 1 if there is one."""
    tree = SourceTree(REPOSITORY)
    findings = tree.check_arrows() + tree.check_torch_and_grpc()
    findings += check_machine_paths(REPOSITORY, repository_files(REPOSITORY))
    for finding in findings:
        print(finding, file=sys.stderr)
    print(f"layers: {len(tree.includes)} C++ files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
