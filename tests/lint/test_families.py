"""Every model family of the servers stands in every file that lists families."""

from __future__ import annotations

import re

import pytest
from check_layers import REPOSITORY

TABLE = "common/model/families/families.cc"
FAMILIES = re.findall(
    r'new \w+\("(\w+)",\s*"(\w+)"', (REPOSITORY / TABLE).read_text(encoding="utf-8")
)
# The files that list families beside the table, and a pattern of a family's entry there.
PLACES = {
    "clients/python/tandem/models/importing.py": r"SERVED_FAMILIES = \([^)]*\"{model_type}\"",
    "tests/parity/test_*_parity.py": r"Case\(\s*\"[^\"]*\",\s*\"{prefix}\"",
    "docs/status.md": r"(?m)^\| [^|]*\b{prefix}\b[^|]* from Hugging Face directories",
}


def test_the_table_is_read():
    assert ("llama", "Llama") in FAMILIES


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("model_type", "prefix"), FAMILIES)
def test_a_family_stands_in_every_place(model_type, prefix, place):
    pattern = PLACES[place].format(model_type=model_type, prefix=prefix)
    text = "".join(file.read_text(encoding="utf-8") for file in REPOSITORY.glob(place))
    assert re.search(pattern, text), (
        f'{TABLE} has the family "{model_type}" ({prefix}): add it to {place}, which needs '
        f"the text {pattern!r} (docs/internals/adding-a-family.md)"
    )
