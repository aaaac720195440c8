"""The servers of a local cluster fit into the machine's memory together, or are refused."""

import pytest

from tandem.errors import ConfigError
from tandem.preflight.memory import PROGRAM_BYTES, PlannedMemory, fitted
from tandem.settings.cluster import ClusterSettings

PRINTED = """\
max_model_len: 2048
# Memory that this configuration needs:
#   1.50 GB  senior_weights
#   4.00 GB  senior_kv_cache: room for 64 of max_num_seqs=64 sequences of 2048 tokens
#   2.00 GB  junior_kv_cache: room for 64 of max_num_seqs=64 sequences
#   9.00 GB  logits (on the device)
#   16.50 GB  in all
#   16.00 GB  available on this machine for a rank
"""


def plan(field: str, available: float = 16e9, sizes_cache: bool = False, **items: float):
    return PlannedMemory(field, items, available, 1, sizes_cache)


def cluster(rollouts: int = 1) -> ClusterSettings:
    return ClusterSettings(rollout=[{}] * rollouts, trainer={})


def test_a_plan_is_read_from_the_comments() -> None:
    read = PlannedMemory.parse("rollout", PRINTED, sizes_cache=True)
    assert read.items == {"senior_weights": 1.5e9, "senior_kv_cache": 4e9, "junior_kv_cache": 2e9}
    assert (read.cache, read.available) == (6e9, 16e9)
    assert read.total == 7.5e9 + PROGRAM_BYTES


def test_ranks_multiply_the_plan() -> None:
    read = PlannedMemory.parse("trainer", PRINTED, 2)
    assert read.total == 2 * (7.5e9 + PROGRAM_BYTES)
    assert read.available == 32e9


def test_servers_that_fit_stay_as_they_are(notes) -> None:
    plans = [
        plan("rollout", sizes_cache=True, senior_kv_cache=6e9, senior_weights=1e9),
        plan("trainer", masters=7e9),
    ]
    assert fitted(cluster(), plans) == cluster()
    assert not notes


def test_a_cache_gets_what_all_else_leaves(notes) -> None:
    plans = [
        plan("rollout", sizes_cache=True, senior_kv_cache=12e9, senior_weights=1.5e9),
        plan("trainer", masters=8.9e9),
    ]
    got = fitted(cluster(), plans)
    assert got.rollout[0]["kv_cache_bytes"] == 16e9 - 1.5e9 - 8.9e9 - 2 * PROGRAM_BYTES
    assert "cluster.rollout: the key-value cache takes 5.0 GB of the 16.0 GB" in notes[0]


def test_two_caches_share_it_by_their_size() -> None:
    plans = [
        plan("rollout.0", sizes_cache=True, senior_kv_cache=12e9),
        plan("rollout.1", sizes_cache=True, senior_kv_cache=4e9),
        plan("trainer", masters=7.1e9),
    ]
    got = fitted(cluster(2), plans)
    assert [one["kv_cache_bytes"] for one in got.rollout] == [6e9, 2e9]


def test_a_cache_with_a_size_of_its_own_keeps_it() -> None:
    plans = [
        plan("rollout", senior_kv_cache=12e9),
        plan("trainer", masters=8.9e9),
    ]
    with pytest.raises(ConfigError, match=r"need 21\.5 GB of memory together") as failed:
        fitted(cluster(), plans)
    assert "rollout 12.3 GB (senior_kv_cache 12.0 GB)" in failed.value.message
    assert "16.0 GB are available" in failed.value.message


def test_models_that_leave_nothing_for_a_cache_are_refused() -> None:
    plans = [
        plan("rollout", sizes_cache=True, senior_kv_cache=1e9, senior_weights=8e9),
        plan("trainer", masters=8.9e9),
    ]
    with pytest.raises(ConfigError, match="together"):
        fitted(cluster(), plans)


def test_a_machine_that_does_not_say_its_memory_is_not_asked() -> None:
    plans = [PlannedMemory("trainer", {"masters": 1e15}, None)]
    assert fitted(cluster(), plans) == cluster()
