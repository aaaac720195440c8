"""Configuration files."""

from pathlib import Path

import pytest

from tandem import settings
from tandem.errors import ConfigError
from tandem.settings import ClusterSettings, RunSettings
from tandem.trainer.v1.objective_pb2 import PolicyObjective

BASE = """
run_dir: /tmp/x
tokenizer: model
data: {reasoning_gym: {name: chain_sum, config: {min_terms: 2}}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return path


def load(file, *overrides):
    return settings.load(RunSettings, file, overrides)


def test_later_overrides_win_and_values_are_yaml(file):
    run = load(file, "steps=3", "steps=7", "sampling.top_p=9e-1", "servers.rollout=[a:1, b:2]")
    assert run.steps == 7
    assert run.sampling.top_p == 0.9
    assert run.servers.rollout == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.prompts_per_stp=3", "batch.prompts_per_stp: unknown key; did you mean 'prompts_pe"),
        ("stepz=3", "stepz: unknown key; did you mean 'steps'"),
        ("data.reasoning_gym.sead=1", "did you mean 'seed'"),
        ("sampling.top_p=2", "sampling.top_p: Input should be less than or equal to 1"),
        ("tandem.selection_strategy=wrd", "tandem.selection_strategy: Input should be 'bernoulli'"),
        ("data.jsonl=x", "data: give exactly one of"),
        ("steps", "write it as dotted.key=value"),
        ("data.extract='('", "data.extract: not a regular expression: missing )"),
        ("reward.answer_pattern='['", "reward.answer_pattern: not a regular expression"),
        ("objective.clip_ratio_low=.nan", "objective.clip_ratio_low: Input should be a finite"),
        ("objective.agregation=x", "objective.agregation: unknown key; did you mean 'aggregation'"),
        ("objective.old_logprobs=x", "objective.old_logprobs: Input should be 'senior', 'author' "),
        ("objective.advantage_estimator=provided", "objective.advantage_estimator: Input should"),
        ("objective.max_staleness=1.5", "objective.max_staleness: Input should be a valid integer"),
        ("objective.max_staleness=2147483648", "objective.max_staleness: Input should be less"),
        ("reward.correct_at=.inf", "reward.correct_at: Input should be a finite"),
        ("tokenizer=''", "tokenizer: must not be empty"),
        ("run_dir=''", "run_dir: must not be empty"),
        ("data.reasoning_gym.name=''", "data.reasoning_gym.name: String should have at least 1"),
        ("reward.function=''", "reward.function: String should have at least 1"),
        ("servers.rollout=[]", "servers.rollout: List should have at least 1"),
        ("servers.rollout=['']", "servers.rollout.0: String should have at least 1"),
        ("eval.k=[]", "eval.k: List should have at least 1"),
        ("eval.modes=[]", "eval.modes: List should have at least 1"),
        ("eval.modes=[duo]", "eval.modes.0: Input should be 'solo', 'handoff' or 'legibility'"),
        ("eval.modes=[solo, solo]", "eval: a mode is listed twice"),
        ("batch.samples_per_prompt=2147483648", "batch.samples_per_prompt: Input should be less"),
        ("reference=juinor", "reference: must be trainer, junior or HOST:PORT, not 'juinor'"),
        ("objective.reference_logprobs=provided", "objective.reference_logprobs: unknown key"),
        ("kl_control.target=0", "kl_control.target: Input should be greater"),
        ("kl_control.horizon=0", "kl_control.horizon: Input should be greater"),
        ("reward.overlong_buffer={}", "reward.overlong_buffer.len: Field required"),
        ("reward.overlong_buffer={len: 0}", "reward.overlong_buffer.len: Input should be greater"),
        (
            "reward.overlong_buffer={len: 1, penalty_factor: 0}",
            "reward.overlong_buffer.penalty_factor: Input should be greater",
        ),
        ("batch={samples_per_prompt: 1, filter_groups: {}}", "batch: filter_groups: would drop"),
        (
            "batch.filter_groups.max_num_gen_batches=0",
            "batch.filter_groups.max_num_gen_batches: Input should be greater",
        ),
        ("batch.samples_per_prompt=2147483647", "batch: a step has at most 2147483647 samples"),
        ("eval.samples=2147483648", "eval.samples: Input should be less"),
        ("sampling.max_tokens=2147483648", "sampling.max_tokens: Input should be less"),
        ("tandem.boundary_token_ids=[-1]", "tandem.boundary_token_ids.0: Input should be greater"),
        ("servers.rollout.3=x", "servers.rollout: Input should be a valid list"),
        ("run_dir=2024-13-45", "override 'run_dir=2024-13-45': the value is not YAML: month must"),
        ("run_dir=!!bool x", "the value is not YAML"),
        ("run_dir=" + "[" * 1000, "the value is not YAML"),
    ],
)
def test_mistakes_are_named_by_path(file, override, message):
    with pytest.raises(ConfigError) as caught:
        load(file, override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("servers.rollout.0.x=1", "servers.rollout.0: Input should be a valid string"),
        ("eval.k.0.a.b=1", "eval.k.0: Input should be a valid integer"),
        ("eval.k.1=1", "override 'eval.k.1=1': no item 1 in a list of 1"),
        ("eval.k.²=1", "override 'eval.k.²=1': no item ² in a list of 1"),
        ("eval.k.x.y=1", "override 'eval.k.x.y=1': no item x in a list of 1"),
    ],
)
def test_mistakes_inside_lists_are_named_by_path(file, override, message):
    file.write_text(BASE + "servers: {rollout: [a:1]}\neval: {k: [1]}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, override)
    assert message in str(caught.value)


def test_known_keys_are_listed_once(file):
    with pytest.raises(ConfigError) as caught:
        load(file, "data.xyz=1", "data.uvw=2", "eval.data.jsonl=x", "eval.data.xyz=1")
    message = str(caught.value)
    for key in ("data.xyz", "data.uvw", "eval.data.xyz"):
        assert message.count(f" {key}: unknown key") == 1
    # Once for data, once for eval.data.
    assert message.count("known: jsonl, reasoning_gym") == 2


def test_several_problems_stand_below_each_other(file):
    with pytest.raises(ConfigError) as caught:
        load(file, "steps=many", "nonsence=1")
    first, *lines = str(caught.value).splitlines()
    assert first == f"{file}: 2 problems:"
    assert [line.split(":")[0] for line in lines] == ["  - steps", "  - nonsence"]


def test_a_place_that_is_no_yaml_is_one_line(file):
    file.write_text("steps: 3\ndata: {jsonl: [}\n")
    with pytest.raises(ConfigError, match=rf"^{file}: not YAML: line 2, column 16: ") as caught:
        load(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(file):
    file.write_bytes(b"run_dir: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(file)


@pytest.mark.parametrize("text", ["run_dir: 2024-13-45", "run_dir: [", "run_dir: !!float x"])
def test_a_file_that_is_no_yaml_is_refused(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{file}: not YAML: "):
        load(file)


def test_resolved_configuration_reads_back_the_same(file, tmp_path):
    run = load(file, "steps=9")
    again = tmp_path / "again.yaml"
    again.write_text(settings.dump(run))
    assert load(again) == run


def test_derived_sizes(file):
    run = load(file, "batch.prompts_per_step=4", "batch.samples_per_prompt=5", "steps=10")
    assert run.derived()["samples_per_step"] == 20
    assert run.derived()["samples_in_run"] == 200


def test_an_objective_has_the_fields_of_the_contract(file):
    run = load(file, "objective.aggregation=token_sum", "objective.max_staleness=2")
    fields = [field.name for field in PolicyObjective.DESCRIPTOR.fields]
    assert [*run.objective.model_dump(), "reference_logprobs"] == sorted(
        fields, key=lambda name: name == "reference_logprobs"
    )
    assert settings.given(run.objective) == {"aggregation": "token_sum", "max_staleness": 2}


@pytest.mark.parametrize("source", ["junior", "somewhere:7701", "[::1]:7701"])
def test_a_reference_beside_the_trainer_s_is_provided(file, source):
    assert load(file).policy_objective() == {}
    run = load(file, f"reference='{source}'", "objective.kl_coefficient=0.1")
    assert run.policy_objective() == {"kl_coefficient": 0.1, "reference_logprobs": "provided"}
    assert run.reference_address == (None if source == "junior" else source)


def test_relative_paths_start_at_the_file_that_names_them(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "run.yaml").write_text(
        "run_dir: ../runs/a\ntokenizer: model\ncluster: sub/cluster.yaml\nstart_from: ../runs/b\n"
        "data: {jsonl: rows.jsonl}\nreward: {function: 'judge.py:reward'}\n"
        "eval: {data: {jsonl: /held.jsonl}}\n"
    )
    (folder / "sub").mkdir()
    (folder / "sub/cluster.yaml").write_text(
        "directory: servers\nrollout: [{senior_model: m, junior_model: ../j}]\n"
        "trainer: {model: m}\n"
    )
    monkeypatch.chdir(tmp_path)
    run = settings.load(
        RunSettings, Path("configs/run.yaml"), ["tokenizer=other", "cluster.trainer.model=mine"]
    )
    assert run.run_dir == tmp_path / "runs/a"
    assert run.start_from == tmp_path / "runs/b"
    assert run.data.jsonl == folder / "rows.jsonl"
    assert run.reward.function == f"{folder}/judge.py:reward"
    assert run.eval.data.jsonl == Path("/held.jsonl")
    assert run.cluster.directory == folder / "sub/servers"
    assert run.cluster.rollout == [
        {"senior_model": str(folder / "sub/m"), "junior_model": str(folder / "j")}
    ]
    # An override is of the command line, whose folder is the working directory.
    assert run.tokenizer == tmp_path / "other"
    assert run.cluster.trainer["model"] == str(tmp_path / "mine")


def test_start_from_is_a_word_or_a_path(file, tmp_path):
    assert load(file).start_from is None
    assert load(file, "start_from=base").start_from == "base"
    assert load(file, "start_from=served").start_from == "served"
    assert load(file, "start_from=/runs/a").start_from == Path("/runs/a")


def test_overrides_reach_into_the_cluster_file(file, tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        "rollout: {senior_model: m}\ntrainer: {model: m, optimizer: {learning_rate: 1.0e-6}}\n"
    )
    file.write_text(BASE + "cluster: cluster.yaml\n")
    run = load(
        file, "cluster.trainer.optimizer.learning_rate=1e-4", "cluster.rollout.max_num_seqs=8"
    )
    assert run.cluster.trainer["optimizer"] == {"learning_rate": 1e-4}
    assert run.cluster.rollout[0]["max_num_seqs"] == 8
    with pytest.raises(ConfigError, match=f"{tmp_path}/none.yaml: No such file"):
        load(file, f"cluster={tmp_path}/none.yaml")


def test_one_file_may_hold_run_and_cluster(file, tmp_path):
    file.write_text(BASE + "cluster: {rollout: {senior_model: m}, trainer: {model: m}}\n")
    assert load(file).cluster.trainer == {"model": str(tmp_path / "m")}
    with pytest.raises(ConfigError, match=r"cluster\.trainr: unknown key; did you mean 'trainer'"):
        load(file, "cluster.trainr={}")


@pytest.mark.parametrize("text", ["", "directory: x", "rollout: []"])
def test_a_cluster_without_servers_is_refused(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no server: give rollout, trainer or critic"):
        settings.load(ClusterSettings, path)


def test_runs_save_now_and_then_unless_they_are_told_not_to(file):
    assert load(file).checkpoint.every > 0
    assert load(file, "checkpoint.every=0").checkpoint.every == 0


def test_cluster_takes_one_rollout_or_several(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("rollout: {senior_model: m}\n")
    assert settings.load(ClusterSettings, path).rollout == [{"senior_model": f"{tmp_path}/m"}]
    path.write_text("rollout: [{senior_model: m}, {senior_model: m}]\n")
    assert len(settings.load(ClusterSettings, path).rollout) == 2
