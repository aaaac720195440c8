"""The commands given to clang-tidy, and how its output is classified."""

from __future__ import annotations

import json
from pathlib import Path

from run_clang_tidy import commands_for_clang, is_only_unreadable

UNKNOWN = (
    "a.h:1:2: error: use of undeclared identifier '__builtin_shuffle' [clang-diagnostic-error]"
)
MISSING = "a.h:1:2: error: 'b.pb.h' file not found [clang-diagnostic-error]"
FINDING = "a.cc:3:4: error: use nullptr [modernize-use-nullptr,-warnings-as-errors]"


def test_code_that_only_gcc_reads_is_no_finding():
    assert is_only_unreadable(UNKNOWN)


def test_a_finding_beside_it_counts():
    assert not is_only_unreadable(UNKNOWN + "\n" + FINDING)


def test_a_missing_header_counts():
    assert not is_only_unreadable(MISSING)


def test_a_crash_counts():
    assert not is_only_unreadable("PLEASE submit a bug report")


def test_clang_gets_no_precompiled_headers(tmp_path: Path):
    file = tmp_path / "a.cc"
    pch = "CMakeFiles/torch_headers.dir/cmake_pch.hxx"
    of_gcc = f"--param=ggc-min-heapsize=9 -fpch-preprocess -Winvalid-pch -include {tmp_path}/{pch}"
    command = f"g++ -O3 {of_gcc} -o a.o -c {file}"
    entry = {"directory": str(tmp_path), "file": str(file), "command": command}
    (tmp_path / "compile_commands.json").write_text(json.dumps([entry]))
    folder, compiled = commands_for_clang(tmp_path)
    (written,) = json.loads((folder / "compile_commands.json").read_text())
    assert written["command"] == f"g++ -O3 -o a.o -c {file}"
    assert compiled == {file}
