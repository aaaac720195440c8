"""The contract's checks pass on the repository, and find every kind of change they are for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from proto_contract import GOLDEN, PROTO_ROOT, Contract, ContractError

TRAJECTORY = "tandem/types/v1/trajectory.proto"
ROLLOUT = "tandem/rollout/v1/rollout.proto"


@pytest.fixture
def edited(tmp_path: Path):
    """A function that copies the protos with one edit and returns their Contract."""

    def make(file: str, pattern: str, replacement: str) -> Contract:
        root = tmp_path / "proto"
        shutil.copytree(PROTO_ROOT, root)
        path = root / file
        text, count = re.subn(pattern, replacement, path.read_text(), count=1)
        assert count == 1, f"{pattern} is not in {file}"
        path.write_text(text)
        return Contract(proto_root=root, golden=GOLDEN)

    return make


def test_protos_follow_the_style_rules():
    Contract().lint()


def test_protos_are_compatible_with_the_golden_set():
    Contract().check_compatible()


def test_golden_set_is_current():
    Contract().check_current()


def test_a_removed_field_is_incompatible(edited):
    contract = edited(TRAJECTORY, r"  bytes authorship_mask = 3;\n", "")
    with pytest.raises(ContractError, match='field "3" with name "authorship_mask"'):
        contract.check_compatible()


def test_a_renumbered_field_is_incompatible(edited):
    with pytest.raises(ContractError, match="author_logprobs"):
        edited(TRAJECTORY, r"author_logprobs = 4;", "author_logprobs = 44;").check_compatible()


def test_a_changed_type_is_incompatible(edited):
    with pytest.raises(ContractError, match="changed type"):
        edited(TRAJECTORY, r"uint64 seed = 10;", "string seed = 10;").check_compatible()


def test_a_renamed_field_is_incompatible_in_json(edited):
    with pytest.raises(ContractError, match="json_name"):
        edited(TRAJECTORY, r"uint64 seed = 10;", "uint64 rng_seed = 10;").check_compatible()


def test_a_removed_rpc_is_incompatible(edited):
    contract = edited(ROLLOUT, r"(?s)  rpc Pause\(.*?\n  }\n", "")
    with pytest.raises(ContractError, match='RPC "Pause"'):
        contract.check_compatible()


def test_an_added_field_is_compatible_but_must_enter_the_golden_set(edited):
    contract = edited(
        TRAJECTORY, r"(  uint64 seed = 10;)", r"\1\n  // Something new.\n  int32 novelty = 1000;"
    )
    contract.lint()
    contract.check_compatible()
    with pytest.raises(ContractError, match="make proto-golden"):
        contract.check_current()


def test_an_uncommented_field_breaks_the_style_rules(edited):
    contract = edited(TRAJECTORY, r"(  uint64 seed = 10;)", r"\1\n  int32 novelty = 1000;")
    with pytest.raises(ContractError, match='"novelty" should have a non-empty comment'):
        contract.lint()


def test_a_badly_named_field_breaks_the_style_rules(edited):
    with pytest.raises(ContractError, match="lower_snake_case"):
        edited(TRAJECTORY, r"uint64 seed = 10;", "uint64 Seed = 10;").lint()
