"""The weights that draw the rollouts of each step of an asynchronous run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The schedule of publications, and of the steps that are drawn between two of them.

    The rollout servers get the weights after step `origin`, and then those after every `staleness`
    steps. With the weights after step p the steps p + 2 to p + 1 + staleness are drawn, so that the
    trainer always has a step to begin with: the rollouts of a step lie 1 to `staleness` steps
    behind. The first weights also draw step `origin` + 1, which is not behind.

    Nothing depends on how long a step takes: two runs draw every step with the same weights.

    Attributes:
        staleness: most steps that rollouts lie behind, at least 1.
        origin: the step after which the schedule begins; 0 in a run that was never prolonged.
    """

    staleness: int
    origin: int = 0

    def drawn_after(self, step: int) -> int:
        """Returns the step whose weights draw `step`, which comes after the origin."""
        windows = max(0, step - self.origin - 2) // self.staleness
        return self.origin + windows * self.staleness

    def is_publication(self, step: int) -> bool:
        """Whether the rollout servers get the weights after a step."""
        return step >= self.origin and (step - self.origin) % self.staleness == 0

    def last_drawn_with(self, publication: int) -> int:
        """Returns the last step that is drawn with the weights after step `publication`."""
        return publication + self.staleness + 1

    def last_drawn_before(self, step: int) -> int:
        """Returns the last step that is drawn with older weights than those after a step."""
        if step <= self.origin:
            return self.origin
        windows = math.ceil((step - self.origin) / self.staleness)
        return self.origin + windows * self.staleness + 1
