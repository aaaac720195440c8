"""The teachers of a run's distillation."""

from __future__ import annotations

from tandem.settings.base import FrozenModel, Name

# Tokens of a teacher that a run compares where objective.distillation.top_k is not set.
DEFAULT_TOP_K = 32

# The model of each teacher, by the name that metrics and rows have for the teacher.
Teachers = dict[Name, FrozenModel]
