"""The values examples of the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
EXAMPLES = sorted(path.stem for path in (KUBERNETES / "examples").glob("*.yaml"))


def example_values(name: str) -> dict[str, Any]:
    """The values of an example."""
    return yaml.safe_load((KUBERNETES / "examples" / f"{name}.yaml").read_text())
