"""The defaults in docs/configuration.md are those that the servers fill in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import harness
import pytest
import yaml
from tandem.cluster import find_binary

PAGE = (harness.REPOSITORY / "docs/configuration.md").read_text()
# Overrides to resolve each role with: a strategy's fields have defaults when it is chosen.
OVERRIDES = {
    "rollout": [[]],
    "trainer": [[f"strategy.name={name}"] for name in ("single", "zero", "megatron")],
    "critic": [[f"strategy.name={name}"] for name in ("single", "zero", "megatron")],
}


def documented(role: str) -> dict[str, str]:
    """The defaults that the page gives the settings of a server, by dotted path."""
    settings = {}
    for section in PAGE.split("\n## ")[1:]:
        title = re.match(r"`(.+?)`", section).group(1)
        if title.startswith("tandem-") and title != f"tandem-{role}-server":
            continue
        for path, default in re.findall(r"^\| `(\S+)` \| .+? \| `(.+?)` \|", section, re.M):
            # "7701 rollout, 7702 trainer, 7703 critic"
            of_role = re.search(rf"(\d+) {role}\b", default)
            settings[path] = of_role.group(1) if of_role else default
    return settings


def resolved(role: str, model: Path, overrides: list[str]) -> dict[str, Any]:
    """The settings that a server prints with --check-config, by dotted path."""
    field = "senior_model" if role == "rollout" else "model"
    extra = ["untie_embeddings=true"] if role == "critic" else []
    command = [find_binary(f"tandem-{role}-server"), "--check-config", f"{field}={model}"]
    done = subprocess.run([*command, *extra, *overrides], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def flat(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {path: value}
        inner = [flat(v, f"{path}.{k}" if path else k) for k, v in value.items()]
        return {path: v for settings in inner for path, v in settings.items()}

    return flat(yaml.safe_load(done.stdout), "")


def same(value: Any, text: str) -> bool:
    """Whether a value equals the text of the page; numbers are compared as numbers."""
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value).lower() == text


@pytest.mark.parametrize("role", OVERRIDES)
def test_the_page_has_the_defaults_that_the_server_fills_in(role: str, models: harness.Models):
    found = {}
    for overrides in OVERRIDES[role]:
        found |= resolved(role, models.senior, overrides)
    defaults = documented(role)
    wrong = {
        path: (found.get(path), default)
        for path, default in defaults.items()
        if path in found and not same(found[path], default)
    }
    for given in ("strategy.name", "untie_embeddings"):  # set by this test
        wrong.pop(given, None)
    assert wrong == {}
    assert len(defaults.keys() & found.keys()) > 20
