"""The section `async` of a run file."""

from __future__ import annotations

from pydantic import Field

from tandem.settings.base import Settings

# Most versions that the trainer can look back: it remembers the digests of its last 1,024 versions.
MOST_VERSIONS = 1000


class AsyncSettings(Settings):
    """Rollouts that are drawn ahead of the training, while earlier steps train."""

    # Most steps that the weights of a rollout may lie behind those that it trains, and most steps
    # that are drawn ahead. The rollout servers get new weights after every max_staleness steps. 0:
    # each step is drawn with the weights of the step before.
    max_staleness: int = Field(0, ge=0, le=64)
