"""The generated pages are current, and the code uses what they list."""

from __future__ import annotations

import re

import api_reference
import pytest
from api_reference import api_page
from check_layers import REPOSITORY
from reference_docs import (
    FLAT,
    REASONS,
    RENAMED,
    Schema,
    errors_page,
    flat_names,
    pages,
    reasons,
    renamed_names,
)


@pytest.fixture(scope="module")
def settings():
    schema = Schema.compile()
    return {
        row.path: row
        for server in ("Rollout", "Trainer", "Critic")
        for group in schema.groups(f".tandem.config.v1.{server}ServerConfig")
        for row in group.rows
    }


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_a_generated_page_is_current(path):
    assert path.read_text() == pages()[path]


def test_every_setting_has_a_type_and_a_meaning(settings):
    assert len(settings) > 40
    assert [row.path for row in settings.values() if not row.type or not row.meaning] == []


def test_defaults_come_from_the_comments(settings):
    assert settings["optimizer.learning_rate"].default == "1e-6"
    assert settings["optimizer.schedule"].default == "constant"
    assert settings["server.insecure"].default == "false"
    assert settings["senior.model"].default == "required"
    assert settings["speculator.optimizer.learning_rate"].default == "required"
    assert "Default" not in settings["speculator.optimizer.learning_rate"].meaning
    assert settings["optimizer.total_steps"].default == ""


def test_types_are_in_words(settings):
    assert settings["tandem.boundary_token_ids"].type == "list of integer"
    assert settings["on_weight_update"].type == "`recompute` \\| `keep`"


def test_every_renamed_name_is_read_and_its_new_name_exists():
    text = RENAMED.read_text()
    names = renamed_names(text)
    assert len(names) == text.count('    {"') > 15
    contract = {
        field.name for message in Schema.compile().messages.values() for field in message.field
    }
    flat = set(flat_names(FLAT.read_text()).values())
    reported = (REPOSITORY / "common/rpc/metrics/metric_names.h").read_text()
    for old, new in names.items():
        assert new in contract | flat or f'"{new}"' in reported, (old, new)
        assert old not in contract


def test_a_reason_may_be_written_over_several_lines():
    header = 'inline constexpr ErrorReason kA{\n "A_B", "One " "sentence.",\n "Do \\"this\\"."};'
    assert [(r.name, r.meaning) for r in reasons(header)] == [("A_B", "One sentence.")]
    assert "| `A_B` | One sentence. |" in errors_page(header)


def test_every_reason_is_complete_and_listed_once():
    text = REASONS.read_text()
    listed = reasons(text)
    assert len(listed) == text.count("inline constexpr ErrorReason")
    assert len({r.name for r in listed}) == len(listed)
    for reason in listed:
        assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", reason.name)
        assert reason.meaning.endswith(".")
        assert reason.remedy.endswith(".")


def test_every_reason_is_used():
    constants = re.findall(r"constexpr ErrorReason (k\w+)", REASONS.read_text())
    code = "".join(
        path.read_text()
        for folder in ("common", "services")
        for path in (REPOSITORY / folder).rglob("*.cc")
        if not path.name.endswith("_test.cc")
    )
    assert [name for name in constants if f"reason::{name}" not in code] == []


def test_every_public_name_of_the_client_has_a_docstring_and_is_in_the_reference():
    import tandem

    page = api_page()
    for name in tandem.__all__:
        assert f"### `{name}`\n" in page
        assert getattr(tandem, name).__doc__, name
    for method in ("train_step", "export_model", "watch_steps"):
        assert f"- `{method}(" in page


def test_sections_of_a_docstring_become_lists():
    from tandem import Prompt

    entry = api_reference._entry("Prompt", Prompt)
    assert "- `num_samples`: number of responses" in entry
    assert "seed: int = 0" in entry
