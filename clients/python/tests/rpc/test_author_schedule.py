"""The reference implementation of the author schedule."""

import pytest

from tandem.rpc.author_schedule import AUTHOR, authorship_mask, philox4x32, uniform
from tandem.rpc.seeds import prompt_seed

BASE = {"enabled": True, "prob_senior": 0.5, "chunk_size": 3, "max_gap_tokens": 4}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_the_known_answers_of_random123(counter, key, expected):
    assert philox4x32(counter, key) == expected


def mask(strategy, tokens, **changes):
    config = BASE | {"selection_strategy": strategy} | changes
    return authorship_mask(tokens, config, seed=5, sample_index=1, boundaries={9})


def test_chunk_and_alternating_switch_authors_by_position():
    assert mask("chunk", range(8)) == [1, 1, 1, 0, 0, 0, 1, 1]
    assert mask("alternating", range(5)) == [1, 0, 1, 0, 1]


def test_sentence_toggles_after_a_boundary():
    assert mask("sentence", [1, 9, 9, 2, 9]) == [1, 1, 0, 1, 1]


def test_word_draws_after_boundaries_and_after_the_gap():
    tokens = [1, 9, 2, 3, 4, 5, 6, 7, 8, 1]
    draws = [0, 2, 6]
    coins = {t: int(uniform(5, 1, t, AUTHOR) < 0.5) for t in draws}
    expected = [coins[max(d for d in draws if d <= t)] for t in range(len(tokens))]
    assert mask("word", tokens) == expected


def test_own_boundaries_replace_the_default_set():
    assert mask("sentence", [9, 1, 2], boundary_token_ids=[1]) == [1, 1, 0]


def test_without_tandem_or_with_a_certain_coin_there_is_one_author():
    assert mask("bernoulli", range(6), enabled=False) == [1] * 6
    assert mask("bernoulli", range(6), prob_senior=1.0) == [1] * 6
    assert mask("word", range(6), prob_senior=0.0) == [0] * 6


def turns_of(strategy, tokens, environment, **changes):
    config = BASE | {"selection_strategy": strategy} | changes
    return authorship_mask(tokens, config, 5, 1, boundaries={9}, environment=environment)


def test_behind_an_environment_the_strategy_starts_anew():
    assert turns_of("chunk", range(9), [2, 3]) == [1, 1, 2, 2, 1, 1, 1, 0, 0]
    assert turns_of("alternating", range(7), [1, 4]) == [1, 2, 1, 0, 2, 1, 0]
    # The boundary before the environment's tokens toggles nothing, and neither does one of theirs.
    assert turns_of("sentence", [1, 9, 2, 9, 9, 1, 9, 3], [3, 4]) == [1, 1, 0, 2, 2, 1, 1, 0]
    assert turns_of("bernoulli", range(4), [1, 2], enabled=False) == [1, 2, 2, 1]


def test_whole_turns_alternate():
    assert turns_of("turn", range(9), [2, 3, 5]) == [1, 1, 2, 2, 0, 2, 1, 1, 1]
    # An environment that speaks first ends no turn, and boundaries hand nothing over.
    assert turns_of("turn", [9] * 7, [0, 1, 4]) == [2, 2, 1, 1, 2, 0, 0]
    assert mask("turn", [9] * 5) == [1] * 5


def test_coins_keep_the_number_of_the_token_in_the_response():
    coins = [int(uniform(5, 1, t, AUTHOR) < 0.5) for t in range(12)]
    said = [3, 4]
    expected = [2 if t in said else coins[t] for t in range(12)]
    assert turns_of("bernoulli", range(10, 22), said) == expected
    # Draws at the first token of each turn, and after 4 tokens of the turn without one.
    draws = [0, 5, 9]
    expected = [2 if t in said else coins[max(d for d in draws if d <= t)] for t in range(12)]
    assert turns_of("word", range(10, 22), said) == expected


def test_prompt_seeds_do_not_change_between_releases_and_differ():
    assert prompt_seed(0, 1, 0) == 1885185396456424860
    seeds = {
        prompt_seed(run, step, index, purpose)
        for run in range(3)
        for step in range(5)
        for index in range(5)
        for purpose in ("train", "eval")
    }
    assert len(seeds) == 150
