"""Damaged requests are refused and disturb nothing: see fuzz_requests.py."""

from __future__ import annotations

from random import Random

import pytest
from fuzz_requests import Fuzzer, make_case
from mutator import mutate, places
from steadiness import serving
from tandem._proto.trainer.v1 import trainer_pb2
from valid_calls import make_models, valid_calls

MUTATIONS = 3000


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    with serving(directory, make_models(directory / "models")) as running:
        yield running


def test_every_call_of_the_corpus_is_valid(servers):
    assert Fuzzer(servers, seed=0).refused_calls() == []


def test_a_mutation_is_a_function_of_seed_and_number(servers):
    corpus = valid_calls(servers)
    cases = [make_case(corpus, 3, index) for index in range(2000)]
    assert cases[:100] == [make_case(corpus, 3, index) for index in range(100)]
    assert cases[:100] != [make_case(corpus, 4, index) for index in range(100)]
    assert {case.call.name for case in cases} == {call.name for call in corpus}


def test_every_field_is_mutated():
    def message():
        request = trainer_pb2.TrainStepRequest()
        request.header.policy.norm_constant = 1.0
        request.header.run_id = "run"
        return request

    everywhere = {path for _, _, path in places(message())}
    assert "header.policy.norm_constant" in everywhere
    random = Random(0)
    changed = {mutate(message(), random).partition(":")[0] for _ in range(2000)}
    assert changed == everywhere


def test_damaged_requests_disturb_nothing(servers):
    fuzzer = Fuzzer(servers, seed=0)
    fuzzer.run(first=0, count=MUTATIONS)
    assert not fuzzer.complaints, "\n".join(fuzzer.complaints)
