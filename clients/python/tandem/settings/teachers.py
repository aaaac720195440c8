"""The teachers of a run's distillation."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from tandem.settings.base import Name

# Tokens of a teacher that a run compares where objective.distillation.top_k is not set.
DEFAULT_TOP_K = 32


def _is_teacher(text: str) -> str:
    if text not in ("trainer", "junior") and not re.fullmatch(r"\S+:\d+", text):
        raise ValueError(f"must be trainer, junior or HOST:PORT, not {text!r}")
    return text


# Where each teacher's distributions come from, by the name that metrics and rows have for it.
Teachers = dict[Name, Annotated[str, AfterValidator(_is_teacher)]]
