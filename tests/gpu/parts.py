"""The parts of the check, and the machine that they run on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner import Part, gtest_summary, last_line, last_row, pytest_summary

HERE = Path(__file__).resolve().parent
LAWS = tuple(f"tests/integration/laws/test_{name}_laws.py" for name in ("tandem", "training"))
DTYPES = ("float32", "bfloat16")


class Machine:
    """The unpacked pack on this machine, and how its programs are started."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.project = folder / "project"
        self.bin = self.project / "build/bin"
        self.models = folder / "models"
        self.logs = folder / "results"

    def unpack(self, pack: Path) -> str:
        """Unpacks, and installs the wheels where this Python lacks the client's packages."""
        with tarfile.open(pack) as tar:
            tar.extractall(self.folder, filter="fully_trusted")
        wheels = sorted((self.folder / "wheels").glob("*.whl"))
        wanted = ("grpc", "grpc_health", "pydantic", "rich", "xxhash", "pytest_timeout", "xdist")
        lacks = [name for name in wanted if importlib.util.find_spec(name) is None]
        if wheels and (lacks or self.device == "cuda"):
            if sys.version_info[:2] != (3, 12):
                raise RuntimeError(f"the wheels are for Python 3.12, this is {sys.version}")
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
            command += ["--no-compile", "--no-cache-dir", "--target", str(self.folder / "site")]
            subprocess.run([*command, *map(str, wheels)], check=True, timeout=120)
        elif lacks:
            raise RuntimeError(f"this Python lacks {', '.join(lacks)}, and the pack has no wheels")
        return f"{len(wheels)} wheels, {sum(1 for _ in self.bin.iterdir())} programs"

    def environment(self) -> dict[str, str]:
        """Returns the variables of every part."""
        torch = Path(importlib.util.find_spec("torch").origin).parent
        libraries = [self.folder / "lib", torch / "lib"]
        libraries += sorted(torch.parent.glob("nvidia/*/lib"))
        if self._lacks_libraries(libraries):
            libraries.append(self.folder / "lib-if-missing")
        modules = [
            self.folder / "site",
            self.project / "clients/python",
            self.project / "tests/integration",
            HERE,
        ]
        return {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PYTHONPATH": ":".join(map(str, modules)),
            "TANDEM_BUILD_DIR": str(self.project / "build"),
            "TANDEM_TEST_DEVICE": self.device,
            "TANDEM_TEST_KERNELS": "aten" if self.device == "cpu" else "auto",
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _lacks_libraries(self, libraries: Sequence[Path]) -> bool:
        server = self.bin / "tandem-rollout-server"
        environment = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, libraries))}
        said = subprocess.run(["ldd", server], capture_output=True, text=True, env=environment)
        return "not found" in said.stdout

    def program(self, name: str) -> str:
        """Returns the path of a program of the build."""
        return str(self.bin / name)

    def python(self, script: str, *arguments: object) -> list[str]:
        """Returns the command of a script of this folder."""
        return [sys.executable, str(HERE / script), *map(str, arguments)]

    def rows(self, name: str) -> Path:
        """Returns the file of a part's rows."""
        return self.logs / f"{name}.jsonl"

    def pytest(
        self,
        name: str,
        limit: float,
        dtype: str,
        workers: int,
        *files: str,
        only: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> Part:
        """Returns a part that runs files of tests in one type, of them those that match `only`."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        command += ["--rootdir", str(self.project), "-n", str(workers), "--timeout", "150"]
        command += ["-k", only]
        return Part(
            f"{name} {dtype}",
            limit,
            [*command, *(str(self.project / file) for file in files)],
            {"TANDEM_TEST_DTYPE": dtype} | dict(variables or {}),
            pytest_summary,
        )


def stages(machine: Machine) -> list[list[Part]]:
    """Returns the parts: those of a stage run side by side, so timings have stages of their own."""
    device, big = machine.device, machine.folder / "big"
    shape = "0.5b" if device == "cuda" else "tiny"
    larger = "1.5b" if device == "cuda" else "tiny"
    names = [shape, f"{shape}-junior", f"{shape}-fp32", f"{shape}-junior-fp32"]
    names += [larger] if larger != shape else []
    gtests = [
        Part(test.name, 100, [str(test), "--gtest_brief=1"], {}, gtest_summary, False)
        for test in sorted((machine.folder / "gtest").glob("*_test"))
    ]
    kernels = machine.folder / "gtest/cuda_kernels_test"
    sanitizers = [
        Part(
            f"sanitizer {tool}",
            60,
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", str(kernels)],
            {},
            last_line,
        )
        for tool in ("memcheck", "racecheck")
    ]
    ranks = machine.pytest(
        "ranks", 100, "float32", 2, "tests/integration/laws/test_rank_laws.py",
        only="grpo or scores",
        variables={"TANDEM_TEST_RANKS_PER_GPU": "2"} if device == "cuda" else {},
    )  # fmt: skip
    server = machine.program("tandem-rollout-server")
    facts = f"""nvidia-smi; nproc; free -g; {sys.executable} -c '
import torch, transformers
print(torch.__version__, transformers.__version__)
print(torch.cuda.is_available() and torch.cuda.get_device_name())
'; ldd {server} | grep -i "not found"; {server} --version"""
    decode = [machine.program("tandem-engine-bench"), big]
    jobs = "1x128x64,16x128x64,64x128x32,256x128x16" if device == "cuda" else "1x16x4,4x16x4"
    some_jobs = "1x128x64,64x128x32" if device == "cuda" else "2x16x4"
    graphs = "solo-graphs,tandem-graphs," if device == "cuda" else ""
    sides = f"solo,tandem,{graphs}transformers,graph"
    batch = "16x512" if device == "cuda" else "2x16"
    loss_shape = "8192x896x151936" if device == "cuda" else "64x32x512"
    common = ["--device", device, "--shape", shape]

    def decoding(name: str, limit: float, *options: str) -> Part:
        command = machine.python(
            "decode.py", *decode, machine.rows("decode"), "--device", device, *options
        )
        return Part(f"decode {name}", limit, command, finding=last_row, needs_device=False)

    profile = {"CUDA_INJECTION64_PATH": str(machine.folder / "gpuprof.so")}

    def profiled(name: str, command: list[str]) -> Part:
        counts = {"GPUPROF": str(machine.logs / f"{name}.counts")}
        return Part(f"profile {name}", 40, command, profile | counts)

    return [
        [Part("facts", 60, ["bash", "-c", facts], {}, last_line, False)],
        [
            Part(
                "ceilings",
                30,
                machine.python("ceilings.py", device, machine.rows("ceilings")),
                finding=last_row,
                needs_device=False,
            )
        ],
        [
            Part("models", 90, machine.python("make_models.py", big, *names), needs_device=False),
            *gtests,
            *sanitizers,
            *(
                Part(
                    f"grpo step {dtype}",
                    100,
                    machine.python("grpo_step.py", machine.models, device, dtype),
                    needs_device=False,
                )
                for dtype in DTYPES
            ),
            *(
                machine.pytest("parity", 200, dtype, 5, "tests/parity/test_transformers_parity.py")
                for dtype in DTYPES
            ),
            *(machine.pytest("laws", 200, dtype, 3, *LAWS) for dtype in DTYPES),
            ranks,
        ],
        [
            Part(
                "memory errors",
                60,
                machine.python("memory_errors.py", server, big / shape, device),
            ),
            *(
                Part(
                    f"bits {dtype}",
                    120,
                    machine.python(
                        "bits.py", big, machine.rows("bits"), *common, "--dtype", dtype
                    ),
                    finding=last_row,
                    needs_device=False,
                )
                for dtype in DTYPES
            ),
        ],
        *(
            [decoding(name, limit, "--shape", of, "--dtypes", dtype, "--jobs", job, "--sides", on)]
            for name, limit, of, dtype, job, on in (
                ("bfloat16", 155, shape, "bfloat16", jobs, sides),
                ("larger", 45, larger, "bfloat16", some_jobs, "solo,graph"),
                ("rows", 30, shape, "bfloat16", some_jobs, "rows"),
                ("float32", 45, shape, "float32", some_jobs, "solo,graph"),
            )
        ),
        [
            Part(
                "train",
                80,
                machine.python("learn.py", big, machine.rows("train"), *common, "--batch", batch),
                finding=last_row,
                needs_device=False,
            )
        ],
        [
            Part(
                "overlap",
                100,
                machine.python(
                    "overlap.py", big, machine.rows("overlap"), machine.folder / "gpuprof.so",
                    *common, "--batch", batch,
                ),
                finding=last_row,
                needs_device=False,
            )
        ],
        [
            Part(
                "loss",
                45,
                machine.python(
                    "loss.py", machine.program("tandem-loss-bench"), device,
                    machine.rows("loss"), "--shape", loss_shape,
                ),
                finding=last_row,
                needs_device=False,
            )
        ],
        *(
            [
                profiled(
                    f"decode-{n}",
                    machine.python(
                        "decode.py", *decode, machine.logs / f"profiled-{n}.jsonl", *common,
                        "--dtypes", "bfloat16", "--jobs", f"{n}x128x{tokens}", "--sides", "solo",
                    ),
                )
            ]
            for n, tokens in ((1, 256), (64, 128))  # longer than the profile's quarters of a second
        ),
        [
            profiled(
                "train",
                machine.python(
                    "learn.py", big, machine.logs / "profiled-train.jsonl", *common,
                    "--batch", batch, "--configurations", "bfloat16:float32", "--peers", "",
                ),
            )
        ],
    ]  # fmt: skip
