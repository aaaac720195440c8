"""The names of other trainers lead to settings that exist."""

from typing import Any, get_args

import pytest
from google.protobuf.descriptor import Descriptor

from tandem._proto.config.v1 import server_config_pb2
from tandem.errors import ConfigError
from tandem.settings import foreign_names, loading
from tandem.settings.explain import fields_at, kinds_in
from tandem.settings.run import RunSettings, TrackerName

SERVERS = {
    "trainer": server_config_pb2.TrainerServerConfig.DESCRIPTOR,
    "rollout": server_config_pb2.RolloutServerConfig.DESCRIPTOR,
    "critic": server_config_pb2.CriticServerConfig.DESCRIPTOR,
}


def exists(key: str) -> bool:
    parts = key.split(".")
    if parts[0] == "cluster" and len(parts) > 2 and parts[1] in SERVERS:
        message: Descriptor | None = SERVERS[parts[1]]
        for part in parts[2:]:
            if message is None or part not in message.fields_by_name:
                return False
            message = message.fields_by_name[part].message_type
        return True
    *section, name = parts
    return name in fields_at(RunSettings, [int(one) if one.isdigit() else one for one in section])


def test_a_foreign_key_leads_to_a_setting(subtests: pytest.Subtests) -> None:
    for theirs, ours in foreign_names.KEYS.items():
        with subtests.test(theirs=theirs, ours=ours):
            assert exists(ours)
            assert theirs not in RunSettings.model_fields


def test_a_key_that_does_not_exist_is_noticed() -> None:
    assert not exists("cluster.trainer.optimizer.lr")
    assert not exists("batch.nothing")


@pytest.mark.parametrize("section", ["objective", "data"])
def test_a_foreign_choice_leads_to_one_of_ours(section: str) -> None:
    schema: Any = next(
        kind for kind in kinds_in(RunSettings.model_fields[section].annotation) if kind
    )
    for key, choices in foreign_names.VALUES.items():
        if key in schema.model_fields:
            known = {str(value) for value in kinds_in(schema.model_fields[key].annotation)}
            for theirs, ours in choices.items():
                assert ours in known
                assert theirs not in known


def test_a_foreign_name_is_answered_with_ours(run_file, subtests: pytest.Subtests) -> None:
    for override, said in [
        ("num_generations=8", "num_generations is batch.samples_per_prompt here"),
        ("batch.num_generations=8", "num_generations is batch.samples_per_prompt here"),
        ("optimizer.lr=1e-6", "lr is learning_rate here"),
        ("actor.optim.lr=1e-6", "lr is learning_rate here"),
        ("beta=0.1", "beta is objective.kl_coefficient here"),
        ("objective.beta=0.1", "beta is objective.kl_coefficient here"),
        ("num_train_epochs=2", "num_train_epochs is epochs here"),
        ("optimizer.schedule=cosine", "a setting of servers: cluster.trainer.optimizer"),
        ("objective.advantage_estimator=grpo", "grpo is group_relative here"),
        ("objective.advantage_estimator=GRPO", "GRPO is group_relative here"),
        ("objective.kl_estimator=low_var_kl", "low_var_kl is k3 here"),
    ]:
        with subtests.test(override=override, said=said):
            with pytest.raises(ConfigError) as failed:
                loading.load(RunSettings, run_file, [override])
            assert said in str(failed.value)


def test_literals_of_settings_are_seen_by_this_test() -> None:
    estimator = RunSettings.model_fields["objective"].annotation
    assert "group_relative" in set(
        kinds_in(estimator.model_fields["advantage_estimator"].annotation)
    )
    assert get_args(TrackerName)


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{run_dir: run, tokenizer: model, data: {reasoning_gym: {name: chain_sum}}}")
    return path
