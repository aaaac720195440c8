"""What clang-tidy's output is taken for."""

from __future__ import annotations

from run_clang_tidy import is_only_unreadable

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
