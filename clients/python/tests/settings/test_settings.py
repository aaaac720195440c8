"""Run files and cluster files, with overrides."""

import ast
from pathlib import Path

import pytest

import tandem
from tandem._proto.config.v1.server_config_pb2 import LoraOptions
from tandem._proto.rollout.v1.rollout_pb2 import SpeculativeConfig
from tandem._proto.trainer.v1.objective_pb2 import Distillation, PolicyObjective
from tandem._proto.types.v1.sampling_pb2 import SamplingParams, TandemConfig
from tandem.errors import ConfigError
from tandem.rpc.credentials import FIELDS
from tandem.rpc.renamed import NEW_NAMES
from tandem.settings import loading
from tandem.settings import values as config_values
from tandem.settings.cluster import ClusterSettings, CredentialsSettings, LoraSettings
from tandem.settings.explain import fields_at, sections_in
from tandem.settings.run import (
    ObjectiveSettings,
    RunSettings,
    SamplingSettings,
    SpeculativeSettings,
    TandemSettings,
)

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
    return loading.load(RunSettings, file, overrides)


def test_later_overrides_win_and_values_are_yaml(file):
    run = load(file, "steps=3", "steps=7", "sampling.top_p=9e-1", "servers.rollout=[a:1, b:2]")
    assert run.steps == 7
    assert run.sampling.top_p == 0.9
    assert run.servers.rollout == ["a:1", "b:2"]


def test_mistakes_are_named_by_path(file, subtests):
    for override, message in [
        ("batch.prompts_per_stp=3", "batch.prompts_per_stp: unknown key; did you mean 'prompts_pe"),
        ("stepz=3", "stepz: unknown key; did you mean 'steps'"),
        ("data.reasoning_gym.sead=1", "did you mean 'seed'"),
        ("sampling.top_p=2", "sampling.top_p: must be at most 1, not 2"),
        ("tandem.selection_strategy=wrd", "tandem.selection_strategy: must be bernoulli, "),
        ("data.jsonl=x", "data: give exactly one of"),
        ("steps", "write it as dotted.key=value"),
        ("data.extract='('", "data.extract: not a regular expression: missing )"),
        ("reward.answer_pattern='['", "reward.answer_pattern: not a regular expression"),
        ("objective.clip_ratio_low=.nan", "objective.clip_ratio_low: must be finite, not nan"),
        ("objective.agregation=x", "objective.agregation: unknown key; did you mean 'aggregation'"),
        ("objective.old_logprobs=x", "objective.old_logprobs: must be senior, author or"),
        ("objective.advantage_estimator=provided", "objective.advantage_estimator: must be group_"),
        ("objective.max_staleness=1.5", "objective.max_staleness: must be an integer, not 1.5"),
        (
            "objective.max_staleness=2147483648",
            "objective.max_staleness: must be at most 2147483647",
        ),
        ("reward.correct_at=.inf", "reward.correct_at: must be finite, not inf"),
        ("tokenizer=''", "tokenizer: must not be empty"),
        ("run_dir=''", "run_dir: must not be empty"),
        ("data.reasoning_gym.name=''", "data.reasoning_gym.name: must not be empty"),
        ("reward.function=''", "reward.function: must not be empty"),
        ("servers.rollout=[]", "servers.rollout: must have at least 1 entry"),
        ("servers.rollout=['']", "servers.rollout.0: must not be empty"),
        ("eval.k=[]", "eval.k: must have at least 1 entry"),
        ("eval.modes=[]", "eval.modes: must have at least 1 entry"),
        (
            "eval.modes=[duo]",
            "eval.modes.0: must be solo, junior_solo, tandem, handoff, ",
        ),
        ("eval.modes=[solo, solo]", "eval: a mode is listed twice"),
        ("batch.samples_per_prompt=2147483648", "batch.samples_per_prompt: must be at most"),
        ("reference=juinor", "reference: must be trainer, junior or HOST:PORT, not 'juinor'"),
        ("objective.reference_logprobs=provided", "objective.reference_logprobs: unknown key"),
        ("kl_control.target=0", "kl_control.target: must be greater than 0"),
        ("kl_control.horizon=0", "kl_control.horizon: must be "),
        ("reward.overlong_buffer={}", "reward.overlong_buffer.len: is required"),
        ("reward.overlong_buffer={len: 0}", "reward.overlong_buffer.len: must be "),
        (
            "reward.overlong_buffer={len: 1, penalty_factor: 0}",
            "reward.overlong_buffer.penalty_factor: must be ",
        ),
        ("batch={samples_per_prompt: 1, filter_groups: {}}", "batch: filter_groups: would drop"),
        (
            "batch.filter_groups.max_num_gen_batches=0",
            "batch.filter_groups.max_num_gen_batches: must be ",
        ),
        ("batch.samples_per_prompt=2147483647", "batch: a step has at most 2147483647 samples"),
        ("eval.samples=2147483648", "eval.samples: must be at most"),
        ("sampling.max_tokens=2147483648", "sampling.max_tokens: must be at most"),
        ("tandem.boundary_token_ids=[-1]", "tandem.boundary_token_ids.0: must be "),
        ("servers.rollout.3=x", "servers.rollout: must be a list, not {"),
        ("start_from=3", "start_from: must be base, served or a path, not 3"),
        ("start_from=''", "start_from: must not be empty"),
        ("cluster=3", "cluster: must be a mapping, not 3"),
        ("kl_control=5", "kl_control: must be a mapping, not 5"),
        ("data=[]", "data: must be a mapping, not []"),
        ("seed=x", "override 'seed=x': seed: must be an integer, not 'x'"),
        ("steps=0", "steps: must be at least 1, not 0"),
        ("data.unique=1", "data.unique: must be true or false, not 1"),
        ("correct_at=1", "correct_at: unknown key; did you mean 'reward.correct_at'?"),
        (
            "batch.max_tokens=9",
            "unknown key; did you mean 'sampling.max_tokens' or 'eval.max_tokens'?",
        ),
        (
            "data.format={question}",
            "data.format: must be text; YAML reads braces as a mapping; quote them",
        ),
        ("run_dir=!!bool x", "the value is not YAML"),
        ("run_dir=" + "[" * 1000, "the value is not YAML"),
    ]:
        with subtests.test(override=override, message=message):
            with pytest.raises(ConfigError) as caught:
                load(file, override)
            assert message in str(caught.value)


def test_mistakes_inside_lists_are_named_by_path(file, subtests):
    for override, message in [
        ("servers.rollout.0.x=1", "servers.rollout.0: must be text"),
        ("eval.k.0.a.b=1", "eval.k.0: must be an integer"),
        ("eval.k.1=1", "override 'eval.k.1=1': no item 1 in a list of 1"),
        ("eval.k.²=1", "override 'eval.k.²=1': no item ² in a list of 1"),
        ("eval.k.x.y=1", "override 'eval.k.x.y=1': no item x in a list of 1"),
    ]:
        with subtests.test(override=override, message=message):
            file.write_text(BASE + "servers: {rollout: [a:1]}\neval: {k: [1]}\n")
            with pytest.raises(ConfigError) as caught:
                load(file, override)
            assert message in str(caught.value)


def test_an_old_name_is_refused_with_the_new_one(file, subtests):
    for old in NEW_NAMES:
        with subtests.test(old=old):
            said = f"unknown key; {old} is now "
            for override in (f"{old}=1", f"tandem.{old}=1", f"+actor_rollout_ref.actor.{old}=1"):
                with pytest.raises(ConfigError) as caught:
                    load(file, override)
                assert said in str(caught.value)
                assert NEW_NAMES[old] in str(caught.value)
            file.write_text(BASE + f"objective: {{{old}: 1}}\n")
            with pytest.raises(ConfigError) as caught:
                load(file)
            assert f"objective.{old}: {said}" in str(caught.value)


def test_a_new_name_stands_with_its_section(file):
    with pytest.raises(ConfigError) as caught:
        load(file, "prob_primary=0.5", "tandem_jr_tkn_weight=0.15", "cluster.frozen_dtype=bfloat16")
    message = str(caught.value)
    assert "prob_primary: unknown key; prob_primary is now tandem.prob_senior" in message
    assert "tandem_jr_tkn_weight is now objective.junior_token_loss_weight" in message
    assert "cluster.frozen_dtype: unknown key; frozen_dtype is now junior_dtype" in message


def test_known_keys_are_listed_once(file):
    with pytest.raises(ConfigError) as caught:
        load(file, "data.xyz=1", "data.uvw=2", "eval.data.jsonl=x", "eval.data.xyz=1")
    message = str(caught.value)
    for key in ("data.xyz", "data.uvw", "eval.data.xyz"):
        assert message.count(f" {key}: unknown key") == 1
    # Once for data, once for eval.data.
    assert message.count("known: jsonl, parquet, hub, reasoning_gym") == 2


def test_several_problems_stand_below_each_other(file):
    with pytest.raises(ConfigError) as caught:
        load(file, "steps=many", "nonsence=1")
    assert str(caught.value).splitlines() == [
        "2 problems:",
        "  - override 'steps=many': steps: must be an integer, not 'many'",
        "  - override 'nonsence=1': nonsence: unknown key"
        f"; known: {', '.join(fields_at(RunSettings, ()))}",
    ]


def test_a_problem_is_told_of_where_its_value_was_given(file):
    file.write_text(BASE + "batch: {prompts_per_step: none}\n")
    for overrides, source in [
        ((), str(file)),
        (("batch.samples_per_prompt=2",), str(file)),
        (("batch.prompts_per_step=none",), "override 'batch.prompts_per_step=none'"),
        (("batch={prompts_per_step: none}",), "override 'batch={prompts_per_step: none}'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load(file, *overrides)
        problem = "batch.prompts_per_step: must be an integer, not 'none'"
        assert str(caught.value) == f"{source}: {problem}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "steps: 3\nseed: 1\nsteps: 4\n",
            "line 7, column 1: the key 'steps' is given twice, first",
        ),
        (
            "eval:\n  every: 1\n  every: 1\n",
            "line 7, column 3: the key 'every' is given twice, fir",
        ),
    ],
)
def test_a_key_that_stands_twice_is_named_with_its_line(file, text, message):
    file.write_text(BASE + text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert f"{file}: not YAML: {message}" in str(caught.value)


def test_a_merged_mapping_may_repeat_a_key(file):
    merged = "eval: {data: {<<: &d {jsonl: a.jsonl, limit: 1}, limit: 2}}\n"
    file.write_text(BASE + merged)
    assert load(file).eval.data.limit == 2


def test_scalars_are_those_of_yaml_1_2(file):
    file.write_text(
        BASE
        + "cluster: {trainer: {a: 1e-3, b: 1:30, c: 010, d: 2024-01-01, e: 0x10, f: -.5, g: 1_0}}\n"
    )
    trainer = load(file).cluster.trainer
    assert list(trainer.values()) == [0.001, "1:30", "010", "2024-01-01", 16, -0.5, "1_0"]
    assert config_values.read_yaml(config_values.dump_values(trainer)) == trainer
    text = {"a": "1e3", "b": "1:30", "c": "0o7"}
    assert config_values.read_yaml(config_values.dump_values(text)) == text


@pytest.mark.parametrize("value", ["1:30", "true", "5.0", "'5'"])
def test_a_number_of_steps_is_an_integer(file, value):
    with pytest.raises(ConfigError, match=f"steps={value}.*: steps: must be an integer, not"):
        load(file, f"steps={value}")


def test_a_rollout_server_may_stand_alone(file):
    assert load(file, "servers.rollout=a:1").servers.rollout == ["a:1"]


def test_files_of_another_kind_are_known(file, tmp_path):
    with pytest.raises(ConfigError, match="is a run file, not a cluster file"):
        loading.load(ClusterSettings, file)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("trainer: {model: m}\n")
    with pytest.raises(ConfigError, match="is a cluster file, not a run file"):
        load(cluster)
    with pytest.raises(ConfigError, match="is a run file, not a cluster file"):
        load(file, f"cluster={file}")


def test_a_yaml_error_is_reported_in_one_line_with_its_place(file):
    file.write_text("steps: 3\ndata: {jsonl: [}\n")
    with pytest.raises(ConfigError, match=rf"^{file}: not YAML: line 2, column 16: ") as caught:
        load(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(file):
    file.write_bytes(b"run_dir: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(file)


@pytest.mark.parametrize("text", ["run_dir: [", "run_dir: !!float x"])
def test_a_file_that_is_no_yaml_is_refused(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{file}: not YAML: "):
        load(file)


def test_resolved_configuration_reads_back_the_same(file, tmp_path):
    run = load(file, "steps=9")
    again = tmp_path / "again.yaml"
    again.write_text(loading.dump(run))
    assert load(again) == run


# Sections that are sent whole, as a message of the contract.
MESSAGES = {
    SamplingSettings: SamplingParams,
    TandemSettings: TandemConfig,
    ObjectiveSettings: PolicyObjective,
    SpeculativeSettings: SpeculativeConfig,
    LoraSettings: LoraOptions,
    ObjectiveSettings.model_fields["distillation"].annotation.__args__[0]: Distillation,
}


def test_every_setting_is_read_somewhere():
    """A setting that no code reads would be ignored silently."""
    package = Path(tandem.__file__).parent
    read = {
        node.attr
        for file in package.rglob("*.py")
        if file.parent.name != "settings"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
    }
    # Settings that the schema itself reads for the rest of the package.
    read |= {"reference", "rewards", "name"}
    # Trackers read the record of the run's settings.
    read |= {
        node.slice.value
        for node in ast.walk(ast.parse((package / "trackers/trackers.py").read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    sections = [RunSettings]
    for section in sections:
        carried = set(MESSAGES[section].DESCRIPTOR.fields_by_name) if section in MESSAGES else set()
        if section is CredentialsSettings:
            carried = set(FIELDS)
        for name, field in section.model_fields.items():
            assert name in read | carried, f"{section.__name__}.{name}"
            sections += [one for one in sections_in(field.annotation) if one not in sections]
    assert len(sections) > 15


def test_the_samples_of_a_step_and_a_run_are_products_of_the_settings(file):
    run = load(file, "batch.prompts_per_step=4", "batch.samples_per_prompt=5", "steps=10")
    assert run.derived()["samples_per_step"] == 20
    assert run.derived()["samples_in_run"] == 200


def test_an_objective_has_the_fields_of_the_contract(file):
    run = load(file, "objective.aggregation=token_sum", "objective.max_staleness=2")
    fields = [field.name for field in PolicyObjective.DESCRIPTOR.fields]
    assert [*run.objective.model_dump(), "reference_logprobs"] == sorted(
        fields, key=lambda name: name == "reference_logprobs"
    )
    assert run.objective.given() == {"aggregation": "token_sum", "max_staleness": 2}


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
        "directory: servers\n"
        "rollout:\n"
        "- {senior_model: m, junior_model: ../j, senior_speculator: org/s}\n"
        "- {senior: {model: m, speculator: org/s}, junior: {model: ../j}}\n"
        "trainer: {model: m, speculator: {adapter: mlp, path: ../s}}\n"
    )
    monkeypatch.chdir(tmp_path)
    run = loading.load(
        RunSettings, Path("configs/run.yaml"), ["tokenizer=other", "cluster.trainer.model=mine"]
    )
    assert run.run_dir == tmp_path / "runs/a"
    assert run.start_from == tmp_path / "runs/b"
    assert run.data.jsonl == folder / "rows.jsonl"
    assert run.reward.function == f"{folder}/judge.py:reward"
    assert run.eval.data.jsonl == Path("/held.jsonl")
    assert run.cluster.directory == folder / "sub/servers"
    assert run.cluster.rollout == [
        {
            "senior_model": str(folder / "sub/m"),
            "junior_model": str(folder / "j"),
            # A path, though models of the Hub have names like this.
            "senior_speculator": str(folder / "sub/org/s"),
        },
        {
            "senior": {"model": str(folder / "sub/m"), "speculator": str(folder / "sub/org/s")},
            "junior": {"model": str(folder / "j")},
        },
    ]
    assert run.cluster.trainer["speculator"]["path"] == str(folder / "s")
    # A path in an override starts at the working directory.
    assert run.tokenizer == tmp_path / "other"
    assert run.cluster.trainer["model"] == str(tmp_path / "mine")


def test_start_from_is_a_word_or_a_path(file):
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
        loading.load(ClusterSettings, path)


def test_runs_save_periodically_unless_every_is_0(file):
    assert load(file).checkpoint.every > 0
    assert load(file, "checkpoint.every=0").checkpoint.every == 0


def test_cluster_takes_one_rollout_or_several(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("rollout: {senior_model: m}\n")
    assert loading.load(ClusterSettings, path).rollout == [{"senior_model": f"{tmp_path}/m"}]
    path.write_text("rollout: [{senior_model: m}, {senior_model: m}]\n")
    assert len(loading.load(ClusterSettings, path).rollout) == 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            "reward: {function: a:b}\nrewards: [{function: c:d}]",
            "reward.function only applies to",
        ),
        ("rewards: [{function: a:b}, {function: c:b}]", "rewards.1.name: 'b' is taken"),
        ("rewards: [{function: a:mean}]", "rewards.0.name: reward/mean is a metric already"),
        ("rewards: [{function: a:b, wieght: 2}]", "did you mean 'weight'"),
    ],
)
def test_rewards_that_do_not_go_together_are_refused(file, sections, message):
    file.write_text(BASE + sections)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert message in str(caught.value)


def test_paths_of_reward_functions_start_at_the_run_file(file):
    file.write_text(BASE + "rewards: [{function: judge.py:a}, {function: exact_match}]")
    config = load(file)
    assert [one.function for one in config.reward_functions] == [
        f"{file.parent}/judge.py:a",
        "exact_match",
    ]
    assert config.rewards[1].python_path == file.parent


def test_the_lookups_of_drafts_are_in_order(file):
    with pytest.raises(ConfigError, match="speculative: prompt_lookup_min: 5 is above"):
        load(file, "speculative.prompt_lookup_min=5")
    run = load(file, "speculative.method=ngram", "eval.speculative.method=none")
    assert run.speculative.fields()["method"] == "ngram"
    assert run.eval_speculative.fields() == {}


def test_drafts_change_responses_by_rejection_sampling_alone(file):
    def changes(*drafts):
        return load(file, *(f"speculative.{one}" for one in drafts)).speculative.changes_responses

    rejection = "acceptance_rule=rejection_sampling"
    assert not changes("method=junior")
    assert not changes(rejection)
    assert changes("method=junior", rejection)
    with pytest.raises(ConfigError, match=r"speculative\.acceptance_rule"):
        changes("acceptance_rule=probabilistic")


def test_held_out_prompts_are_written_as_the_others_unless_they_say_otherwise(tmp_path):
    data = {"jsonl": "train.jsonl", "columns": {"prompt": "question"}, "template": "chat"}
    data |= {"format": "{prompt}!", "system": "Be brief.", "limit": 3, "unique": True}
    data |= {"chat_template_kwargs": {"enable_thinking": False}}

    def held_out(**values):
        run = {"run_dir": "run", "tokenizer": "t", "data": data, "eval": {"data": values}}
        return loading.validate(RunSettings, run, "test").eval.data

    test = held_out(jsonl="test.jsonl", system="")
    assert test.columns == {"prompt": "question"}
    assert (test.template, test.format, test.system) == ("chat", "{prompt}!", "")
    assert test.chat_template_kwargs == {"enable_thinking": False}
    # These say which rows there are.
    assert (test.limit, test.unique) == (None, False)
    assert held_out(jsonl="test.jsonl", columns={}).columns == {}
    assert held_out(reasoning_gym={"name": "chain_sum"}).template == "chat"
