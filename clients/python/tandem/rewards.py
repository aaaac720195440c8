"""Rewards: a Python function `reward(prompt, response, **row) -> float`, or a builtin."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.data import Example
from tandem.errors import ConfigError, TandemError
from tandem.settings import RewardSettings

RewardFunction = Callable[..., float]
# Judges the text of a response.
Reward = Callable[[Example, str], float]


def load_reward(settings: RewardSettings) -> Reward:
    """The reward that the settings name."""
    extract = answer_extractor(settings.answer_pattern)
    if settings.function == "exact_match":
        return lambda example, text: float(extract(text) == _answer(example))
    if settings.function == "reasoning_gym":
        return lambda example, text: _gym_score(example, extract(text))
    function = _import(settings.function)

    def judge(example: Example, text: str) -> float:
        row = {key: value for key, value in example.row.items() if key != "prompt"}
        prompt = example.row.get("prompt", example.text)
        try:
            value = function(prompt, text, **row)
        except TandemError:
            raise
        # The function is the user's: it may raise anything.
        except Exception as error:
            raise ConfigError(
                f"reward.function: {settings.function}: {type(error).__name__}: {error} "
                f"({_place(error)})"
            ) from error
        return _finite(value, settings.function)

    return judge


def answer_extractor(pattern: str | None) -> Callable[[str], str]:
    """The last match of `pattern` (its first group, if any), or the stripped text without one."""
    if pattern is None:
        return str.strip
    compiled = re.compile(pattern, re.MULTILINE)

    def extract(text: str) -> str:
        matches = list(compiled.finditer(text))
        return (matches[-1][compiled.groups and 1] or "") if matches else ""

    return extract


def _place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _finite(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"reward.function: {name} returned {value!r}, not a finite number")
    return number


def _answer(example: Example) -> str:
    if "answer" not in example.row:
        raise ConfigError("reward.function: exact_match needs an `answer` in every row")
    return str(example.row["answer"]).strip()


def _gym_score(example: Example, answer: str) -> float:
    if example.scorer is None:
        raise ConfigError("reward.function: reasoning_gym needs data.reasoning_gym")
    return float(example.scorer.score_answer(answer=answer or None, entry=example.row["entry"]))


def _import(name: str) -> RewardFunction:
    source, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"reward.function: {name!r} is none of exact_match, reasoning_gym, "
            "module:function, path/file.py:function"
        )
    try:
        function = getattr(_module(source), attribute)
    # The file is the user's: importing it may raise anything, a SyntaxError for example.
    except Exception as error:
        raise ConfigError(f"reward.function: {name}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"reward.function: {name} is not a function")
    return function


def _module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    spec = importlib.util.spec_from_file_location(_module_name(Path(source)), source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle, for example, look a class's module up by its name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _module_name(file: Path) -> str:
    """A name for the file's module that no import statement can mean."""
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()
    return f"reward file {digest}"
