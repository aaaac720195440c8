"""Every model family of the servers stands in every place that lists families."""

from __future__ import annotations

import re

import config_files
import test_transformers_parity as text
import test_vision_parity as vision
from tandem.models.importing import SERVED_FAMILIES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def test_a_family_stands_in_every_place() -> None:
    """docs/internals/adding-a-family.md names the places."""
    families = set(config_files.key_tables())
    assert set(SERVED_FAMILIES) == families, "tandem/models/importing.py"

    prefixes = {case.family for case in [*text.CASES, *vision.CASES]}
    compared = {text.CONFIG_CLASSES.get(one, f"{one}Config"): one for one in prefixes}
    classes = {CONFIG_MAPPING[family].__name__ for family in families}
    assert classes - set(compared) == set(), "CASES of the parity tests"

    page = (config_files.ROOT / "docs/status.md").read_text()
    [listed] = re.findall(r"^\| ([^|]*) from Hugging Face directories", page, re.M)
    assert {compared[one] for one in classes} - set(re.findall(r"\w+", listed)) == set(), (
        "docs/status.md"
    )
