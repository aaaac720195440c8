"""The bounds in docs/reference/limits.md are those of the code."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from check_layers import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/reference/limits.md").read_text()
SETTINGS = (REPOSITORY / "docs/reference/configuration.md").read_text()

# Units of a bound in the table, in bytes or seconds, and of a duration in the code.
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 1e-3, "s": 1, "h": 3600}
_DURATIONS = {"Milliseconds": 1e-3, "Seconds": 1, "Minutes": 60, "Hours": 3600}


@dataclass(frozen=True)
class Limit:
    """One row of the table."""

    what: str
    bound: str
    where: str
    error: str


def limits() -> list[Limit]:
    """The rows of the table."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", DOCUMENT, re.M)
    return [Limit(*row) for row in rows[2:]]  # without the header and the line below it


def documented(bound: str) -> float:
    """The number that the table gives: "256", "4 MiB", "600 s"."""
    number, unit = re.fullmatch(r"([\d.]+) ?([A-Za-z]*)", bound).groups()
    return float(number) * _UNITS[unit]


def value(expression: str) -> float:
    """The value of a C++ expression: "4 << 20", "int64_t{1} << 30", "absl::Seconds(20)"."""
    text = re.sub(r"\b(?:u?int\d+_t|size_t)\{([^}]*)\}", r"(\1)", expression).replace("'", "")
    for name, seconds in _DURATIONS.items():
        text = re.sub(rf"absl::{name}\(([^)]*)\)", rf"(\1) * {seconds}", text)
    assert re.fullmatch(r"[\d\s.()*<+-]+", re.sub(r"e-?(?=\d)", "", text)), (
        f"not a number: {expression}"
    )
    return float(eval(text))


def constant(name: str, file: str) -> float:
    """The value of a constant, or of an option's default, in a source file."""
    source = (REPOSITORY / file).read_text()
    ending = r"([\w ().*<+-]+)$" if file.endswith(".py") else r"([^;]+);"
    (expression,) = re.findall(rf"\b{name} = {ending}", source, re.M)
    return value(expression.replace("_", "") if file.endswith(".py") else expression)


def default(setting: str) -> float:
    """The default of a setting, which is the same in every section."""
    (found,) = set(re.findall(rf"^\| `{re.escape(setting)}` \| \w+ \| `(.+?)` \|", SETTINGS, re.M))
    return float(found)


def test_numbers_are_read():
    assert documented("4 MiB") == value("4 << 20")
    assert value("int64_t{1} << 30") == documented("1 GiB")
    assert value("absl::Seconds(20)") == documented("20 s")
    assert value("1'000") == 1000
    assert len(limits()) > 1


def test_the_table_of_limits_is_the_code(subtests: pytest.Subtests):
    """No server prints its constants, so the code is read."""
    for limit in limits():
        with subtests.test(limit.what):
            if found := re.fullmatch(r"`(\w+)` in `([\w/.]+)`", limit.where):
                assert constant(*found.groups()) == documented(limit.bound)
            else:
                (setting,) = re.fullmatch(r"`([\w.]+)`", limit.where).groups()
                assert default(setting) == documented(limit.bound)
