"""The C++ test programs that `make check` chooses for changed files."""

from __future__ import annotations

import importlib.util

from check_layers import REPOSITORY

_spec = importlib.util.spec_from_file_location("changed", REPOSITORY / "tests/changed_programs.py")
changed = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(changed)


def test_a_file_belongs_to_the_program_of_its_test_or_of_its_folder():
    known = {
        "ops_test": {"common/ops/ops_test.cc", "common/ops/linear/head_linear_test.cc"},
        "loss_test": {"common/loss/loss_test.cc"},
    }
    for file, programs in {
        "common/loss/loss_test.cc": {"loss_test"},
        "common/loss/loss.h": {"loss_test"},
        "common/ops/linear/scale.cc": {"ops_test"},
        "common/model/model.cc": set(),
        "common/loss/loss.md": set(),
    }.items():
        assert changed.belonging_to(file, known) == programs, file


def test_the_programs_of_the_repository_are_read():
    known = changed.programs()
    assert "common/ops/ops_test.cc" in known["ops_test"]
    assert all((REPOSITORY / file).is_file() for files in known.values() for file in files)
