"""The rewards `gsm8k` and `math`: whether a response comes to the row's answer.

The final answer of a text, a response or a row's `answer` alike, is what the last \\boxed{} holds,
else what follows the last ####.
"""

from __future__ import annotations

import re
import threading
from decimal import Decimal
from typing import Any

# Most seconds of a step of math-verify, which the model's text may make very long.
_SECONDS = 5
_MARK = "####"
_BOXES = ("\\boxed", "\\fbox")
# 1,234 and $5.00 and -3 and .5; what follows a digit or a word is no sign.
_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def final_answer(text: str) -> str | None:
    """Returns the marked final answer of a text; None if it marks none."""
    boxed = _boxed(text)
    if boxed is not None:
        return boxed.strip()
    _, mark, after = text.rpartition(_MARK)
    return after.strip() if mark else None


def final_number(text: str) -> Decimal | None:
    """Returns the last number of the final answer, or of a text that marks none; None without."""
    marked = final_answer(text)
    numbers = _NUMBER.findall(text if marked is None else marked)
    return Decimal(numbers[-1].replace("$", "").replace(",", "")) if numbers else None


def gsm8k(response: str, answer: str) -> float:
    """Returns 1 if the final numbers of response and answer are equal, else 0."""
    number = final_number(response)
    return float(number is not None and number == final_number(answer))


def math(prompt: Any, response: str, answer: Any, **row: Any) -> float:
    """Returns 1 if math-verify finds the response's final answer equal to the row's, else 0.

    Raises ValueError for an answer that it cannot read.
    """
    from math_verify import verify

    gold = _parsed(_in_box(str(answer))) or _parsed(str(answer))
    if not gold:
        raise ValueError(f"the answer {answer!r} cannot be read as mathematics")
    return float(verify(gold, _parsed(response), timeout_seconds=_limit()))


def _parsed(text: str) -> list[Any]:
    """Returns how math-verify reads the final answer of a text, or a text that marks none."""
    from math_verify import parse

    marked = None if _boxed(text) is not None else final_answer(text)
    parsed: list[Any] = parse(text if marked is None else marked, parsing_timeout=_limit())
    return parsed


def _limit() -> int | None:
    """Returns the limit of a step: a signal, which only the main thread gets.

    In another one the caller has the limit.
    """
    return _SECONDS if threading.current_thread() is threading.main_thread() else None


def _in_box(answer: str) -> str:
    """Returns an answer in LaTeX that nothing marks in a box, which math-verify looks for."""
    if "\\" not in answer or final_answer(answer) is not None:
        return answer
    return f"\\boxed{{{answer.strip().strip('$')}}}"


def _boxed(text: str) -> str | None:
    """Returns what the last \\boxed holds: a group in braces, or what stands behind it alone.

    None without one, or with a brace that nothing closes.
    """
    start, command = max((text.rfind(one), one) for one in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        return re.match(r"[^\s$]*", rest)[0] or None
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place]
    return None
