"""Names from before the paper's terms, which are refused with the names that replaced them."""

from __future__ import annotations

import json
from importlib import resources

# Old names to new ones; `make format` writes them from the servers' table.
NEW_NAMES: dict[str, str] = json.loads(
    resources.files("tandem.rpc").joinpath("renamed_names.json").read_text(encoding="utf-8")
)


def advice(name: str) -> str:
    """Returns "; OLD is now NEW", the end of an error about an old name; "" for any other name."""
    return f"; {name} is now {NEW_NAMES[name]}" if name in NEW_NAMES else ""
