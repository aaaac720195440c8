"""Which servers and models of a cluster a run starts."""

import pytest

from tandem.cluster.local import sections
from tandem.cluster.plan import Uses, planned, uses_of
from tandem.errors import ConfigError
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import RunSettings

RUN = """
run_dir: /tmp/x
data: {jsonl: rows.jsonl}
cluster: {model: /m, rollout: {}, trainer: {}, critic: {}}
"""


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return lambda *overrides: loading.load(RunSettings, file, overrides)


def test_one_setting_names_every_model_of_a_cluster():
    cluster = ClusterSettings(
        model="/m", rollout=[{}, {"junior_model": "/j"}], trainer={}, critic={}
    )
    assert [(one.name, one.config) for one in sections(cluster)] == [
        ("critic", {"model": "/m"}),
        ("rollout-0", {"senior": {"model": "/m"}, "junior": {"model": "/m"}}),
        ("rollout-1", {"senior": {"model": "/m"}, "junior_model": "/j"}),
        ("trainer", {"model": "/m"}),
    ]


@pytest.mark.parametrize(
    "named",
    [
        {"senior_model": "/s", "junior_model": ""},
        {"senior": {"model": "/s"}, "junior": {"model": ""}},
        {"senior": {"model": "/s", "dtype": "bfloat16"}, "junior_model": ""},
    ],
)
def test_a_section_keeps_the_models_that_it_names(named):
    cluster = ClusterSettings(model="/m", rollout=[named], trainer={"model": "/s"})
    rollout, trainer = sections(cluster)
    assert rollout.config == named
    assert trainer.config == {"model": "/s"}


def test_a_lane_without_a_model_keeps_its_other_settings():
    section = {"senior": {"dtype": "bfloat16"}, "junior_dtype": "bfloat16"}
    (rollout,) = planned(ClusterSettings(model="/m", rollout=[section])).rollout
    assert rollout == {
        "senior": {"dtype": "bfloat16", "model": "/m"},
        "junior": {"model": "/m"},
        "junior_dtype": "bfloat16",
    }
    wrong = planned(ClusterSettings(model="/m", rollout=[{"senior": 3}])).rollout[0]
    assert wrong["senior"] == 3, "the server refuses it"


def test_a_cluster_without_a_model_is_what_its_sections_say():
    cluster = ClusterSettings(rollout=[{"senior_model": "/s"}], trainer={"model": "/s"})
    assert planned(cluster) == cluster


ON = "objective.distillation.coefficient=1.0"


def test_a_run_uses_what_its_settings_need(load, subtests):
    for overrides, purpose, uses in [
        ([], "train", Uses(critic=False)),
        (["tandem.enabled=false"], "train", Uses(critic=False, junior=False)),
        (["objective.advantage_estimator=gae"], "train", Uses()),
        (["objective.kl_coefficient=0.1"], "train", Uses(critic=False, reference=True)),
        (["objective.kl_coefficient=0.0"], "train", Uses(critic=False)),
        (
            ["objective.kl_coefficient=0.1", "reference=junior", "tandem.enabled=false"],
            "train",
            Uses(critic=False),
        ),
        (["objective.junior_kl_coefficient=0.1"], "train", Uses(critic=False, trainer_junior=True)),
        (
            ["objective.junior_kl_coefficient=0.1", "objective.junior_kl_kind=forward_sampled"],
            "train",
            Uses(critic=False),
        ),
        (
            [ON, "teachers={t: trainer}", "tandem.enabled=false"],
            "train",
            Uses(critic=False, junior=False),
        ),
        (
            [ON, "teachers={t: junior}", "tandem.enabled=false"],
            "train",
            Uses(critic=False),
        ),
        (
            [ON, "teachers={t: junior}"],
            "sft",
            Uses(critic=False),
        ),
        ([], "sft", Uses(rollout=False, critic=False, junior=False)),
        (["eval.every=1"], "sft", Uses(critic=False, junior=False)),
        (["eval.modes=[legibility]"], "drafts", Uses(critic=False, junior=False)),
        (["eval.speculative.method=junior"], "drafts", Uses(critic=False)),
        (["sft.responses=senior"], "sft", Uses(critic=False, junior=False)),
        (["sft.responses=senior", "speculative.method=junior"], "sft", Uses(critic=False)),
        (["eval.every=1", "eval.modes=[handoff]"], "sft", Uses(critic=False)),
        (["objective.kl_coefficient=0.1"], "eval", Uses(critic=False, junior=False)),
        (["eval.modes=[legibility]"], "eval", Uses(critic=False)),
        (
            ["tandem.enabled=false", "eval.every=1", "eval.modes=[legibility]"],
            "train",
            Uses(critic=False),
        ),
    ]:
        with subtests.test(overrides=overrides, purpose=purpose, uses=uses):
            assert uses_of(load(*overrides), purpose) == uses


def test_what_a_run_does_not_use_is_not_started(load):
    run = load("tandem.enabled=false")
    plan = planned(run.cluster, uses_of(run, "train"))
    assert plan.critic is None
    assert plan.rollout == [{"senior": {"model": "/m"}}]
    assert plan.trainer == {"model": "/m"}
    run = load("objective.kl_coefficient=0.1", "objective.junior_kl_coefficient=0.1")
    trainer = planned(run.cluster, uses_of(run, "train")).trainer
    assert trainer == {"model": "/m", "reference_model": "/m", "junior_model": "/m"}
    assert planned(run.cluster, uses_of(run, "sft")).rollout == []


def test_adapters_are_those_of_trainer_and_seniors(load):
    cluster = ClusterSettings(
        model="/m",
        lora={"rank": 8},
        rollout=[{}, {"senior": {"lora": {"rank": 4}}}],
        trainer={},
        critic={},
    )
    plan = planned(cluster, Uses(reference=True))
    assert [section["senior"] for section in plan.rollout] == [
        {"lora": {"rank": 8}, "model": "/m"},
        {"lora": {"rank": 4}, "model": "/m"},
    ]
    assert plan.trainer == {"lora": {"rank": 8}, "model": "/m"}, "it is its own reference"
    assert plan.critic == {"model": "/m"}
    assert planned(plan) == plan


def test_settings_of_a_junior_go_with_it(load):
    junior = {"junior_dtype": "bfloat16", "junior_quantization": "int4"}
    run = load(f"cluster.rollout={junior | {'senior_dtype': 'bfloat16'}}")
    assert planned(run.cluster).rollout[0].items() >= junior.items()
    solo = planned(run.cluster, Uses(junior=False)).rollout
    assert solo == [{"senior": {"model": "/m"}, "senior_dtype": "bfloat16"}]
    named = load(f"cluster.rollout={junior | {'junior_model': '/j'}}")
    kept = planned(named.cluster, Uses(junior=False)).rollout
    assert kept == [{"senior": {"model": "/m"}, "junior_model": "/j", **junior}]
    nested = load("cluster.rollout={junior: {dtype: bfloat16}}")
    solo = planned(nested.cluster, Uses(junior=False)).rollout
    assert solo == [{"senior": {"model": "/m"}}]


def test_frozen_copies_follow_the_models_that_they_are_copies_of(load):
    def trainer(*overrides):
        kl = ["objective.kl_coefficient=0.1", "objective.junior_kl_coefficient=0.1"]
        run = load(*kl, *overrides)
        return planned(run.cluster, uses_of(run, "train")).trainer

    smaller = trainer("cluster.rollout.junior_model=/j")
    assert smaller == {"model": "/m", "reference_model": "/m", "junior_model": "/j"}
    other = trainer("cluster.rollout.senior_model=/s", "cluster.trainer.model=/s")
    assert other == {"model": "/s", "reference_model": "/s", "junior_model": "/m"}
    both = trainer("cluster.rollout=[{junior_model: /j}, {junior_model: /j}]")
    assert both["junior_model"] == "/j"
    # Nothing says which of them is meant, so the trainer refuses the KL.
    assert "junior_model" not in trainer("cluster.rollout=[{junior_model: /j}, {}]")
    assert trainer("cluster.rollout.junior.model=/j")["junior_model"] == "/j"
    named = trainer("cluster.rollout.junior_model=/j", "cluster.trainer.junior_model=/k")
    assert named["junior_model"] == "/k"


def test_the_default_tokenizer_is_that_of_the_clusters_senior(load):
    assert str(load().tokenizer) == "/m"
    assert str(load("cluster.model=/other").tokenizer) == "/other"
    assert str(load("tokenizer=/t").tokenizer) == "/t"
    senior = "cluster={rollout: {senior_model: /s}, trainer: {model: /t}}"
    assert str(load(senior).tokenizer) == "/s"
    assert str(load("cluster={trainer: {model: /t}}").tokenizer) == "/t"
    with pytest.raises(ConfigError, match="tokenizer: is required"):
        load("cluster=null")
