"""docs/limits.md says what the code bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import pytest
from check_layers import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/limits.md").read_text()
SETTINGS = (REPOSITORY / "docs/configuration.md").read_text()

# The units of a bound in the table, in bytes or seconds, and those of a constant in the code.
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
    return [Limit(*row) for row in rows[2:]]  # behind the names of the columns and the rule


def documented(bound: str) -> float:
    """The number that the table gives: "256", "4 MiB", "600 s"."""
    number, unit = re.fullmatch(r"([\d.]+) ?([A-Za-z]*)", bound).groups()
    return float(number) * _UNITS[unit]


def value(expression: str) -> float:
    """What a C++ constant holds: "4 << 20", "int64_t{1} << 30", "absl::Seconds(20)"."""
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
    (expression,) = re.findall(rf"\b{name} = ([^;]+);", source)
    return value(expression)


def default(setting: str) -> float:
    """The default of a setting, the same wherever it occurs."""
    (found,) = set(re.findall(rf"^\| `{re.escape(setting)}` \| \w+ \| `(.+?)` \|", SETTINGS, re.M))
    return float(found)


# How the code compares with a limit by name, and what an error's code looks like where it is made.
_CHECKS = r"\bCheck(?:InRange|AtLeast|Below|Above)\("
_MAKERS = {
    "INVALID_ARGUMENT": rf"InvalidField|InvalidArgumentError|{_CHECKS}",
    "OUT_OF_RANGE": r"kOutOfRange|OutOfRangeError",
    "RESOURCE_EXHAUSTED": r"kResourceExhausted|ResourceExhaustedError",
}


@cache
def sources() -> list[list[str]]:
    """The lines of every C++ file that may make an error of a request."""
    return [
        file.read_text().splitlines()
        for folder in ("common", "services")
        for file in (REPOSITORY / folder).rglob("*")
        if file.suffix in (".h", ".cc") and not re.search(r"_test|testing|config/", str(file))
    ]


def codes(name: str) -> set[str]:
    """The codes that are made where something is compared with a limit, or just behind."""
    found = set()
    for lines in sources():
        if any(name in line for line in lines):
            for i, line in enumerate(lines):
                compares = rf"(?:[<>]=? |{_CHECKS}).*\b{name}_?\b|\b{name}_?\b.* [<>]=? "
                if re.search(compares, line):
                    here = "\n".join(lines[i : i + 6])
                    found |= {code for code, maker in _MAKERS.items() if re.search(maker, here)}
    return found


def test_numbers_are_read():
    assert documented("4 MiB") == value("4 << 20")
    assert value("int64_t{1} << 30") == documented("1 GiB")
    assert value("absl::Seconds(20)") == documented("20 s")
    assert value("1'000") == 1000
    assert len(limits()) > 1


@pytest.mark.parametrize("limit", limits(), ids=lambda limit: limit.what)
def test_the_table_of_limits_is_the_code(limit: Limit):
    if found := re.fullmatch(r"`(\w+)` in `([\w/.]+)`", limit.where):
        assert constant(*found.groups()) == documented(limit.bound)
    else:
        (setting,) = re.fullmatch(r"`([\w.]+)`", limit.where).groups()
        assert default(setting) == documented(limit.bound)


# Where the code is gRPC's, or the comparison is in a class that knows no names.
_ELSEWHERE = {
    "kMaxReceiveBytes",  # gRPC
    "kMaxStopTokenIds",  # CheckIds
    "kMaxBoundaryTokenIds",
    "max_held_bytes",  # ByteBudget
    "max_collected_bytes",
    "max_buffered_bytes",
    "max_request_bytes",
    "queue_capacity",  # BoundedQueue
    "kQueueCapacity",
}


@pytest.mark.parametrize(
    "limit",
    [limit for limit in limits() if re.match(r"[A-Z_]{4,}", limit.error)],
    ids=lambda limit: limit.what,
)
def test_the_codes_are_those_of_the_checks(limit: Limit):
    (name,) = re.match(r"`(?:\w+\.)*(\w+)`", limit.where).groups()
    documented_code = re.match(r"[A-Z_]+", limit.error).group()
    if name not in _ELSEWHERE and documented_code in _MAKERS:
        assert codes(name) == {documented_code}
