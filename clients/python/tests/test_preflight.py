"""What is found to be wrong before anything is started, generated or written."""

import json
import stat
import sys

import fakes
import pytest
import yaml
from commands import tandem

from tandem import preflight, settings
from tandem.errors import ConfigError, ProblemsError, ServerStartError, UnavailableError
from tandem.session import Session
from tandem.settings import RunSettings
from tandem.text import TextCodec

# Says what the real ones say with --check-config.
CHECKER = """#!{python}
import json, sys, yaml
config = yaml.safe_load(open(sys.argv[2]))
def bad(message):
    print("tandem-x-server: bad configuration:", message, file=sys.stderr); sys.exit(2)
if "--check-config" not in sys.argv:
    print("this one is not started"); sys.exit(1)
if "typo" in config:
    bad(sys.argv[2] + ": typo: unknown key")
defaults = {{"max_samples": 64, "max_queue": 16, "junior_model": ""}}
print(yaml.safe_dump(defaults | config), end="")
print("# Memory that this configuration needs:")
if "--check-objective" in sys.argv:
    objective = json.loads(sys.argv[sys.argv.index("--check-objective") + 1])
    if objective.get("junior_kl_coefficient"):
        bad("policy.junior_kl_kind: needs the junior")
    print(json.dumps({{"clip_ratio_low": 0.25}} | objective))
"""


@pytest.fixture
def load(run_file):
    return lambda *overrides: settings.load(RunSettings, run_file, overrides)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster file, and programs that check it."""
    for role in ("rollout", "trainer", "critic"):
        path = tmp_path / "build" / "bin" / f"tandem-{role}-server"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CHECKER.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TANDEM_BUILD_DIR", str(tmp_path / "build"))
    model = str(tmp_path / "model")
    file = tmp_path / "cluster.yaml"
    file.write_text(
        yaml.safe_dump({"rollout": {"senior_model": model}, "trainer": {"model": model}})
    )
    return f"cluster={file}"


def problems(config, **options):
    with pytest.raises(ConfigError) as caught, Session(config, **options):
        pass
    return str(caught.value)


def test_every_problem_is_named_at_once(load, world, tmp_path):
    world.max_samples = 5
    world.objective_failure = fakes.error_status(
        9, "policy.junior_kl_kind: needs the junior", field="policy.junior_kl_kind"
    )
    said = problems(
        load(
            f"data.jsonl={tmp_path / 'nothing.jsonl'}",
            "reward.function=no_such_module:reward",
            f"eval.data.jsonl={tmp_path / 'none.jsonl'}",
        )
    )
    assert said.startswith("5 problems:")
    assert f"data.jsonl: {tmp_path / 'nothing.jsonl'}: No such file" in said
    assert f"eval.data.jsonl: {tmp_path / 'none.jsonl'}: No such file" in said
    assert "no_such_module" in said
    assert "  - objective.junior_kl_kind: needs the junior" in said
    assert "batch: a step has 6 samples, the trainer's max_samples is 5" in said


def test_without_a_tokenizer_the_other_problems_are_still_named(load, tmp_path):
    said = problems(load("tokenizer=/nowhere", f"data.jsonl={tmp_path / 'nothing.jsonl'}"))
    assert "tokenizer: /nowhere/tokenizer.json does not exist" in said
    assert "nothing.jsonl: No such file" in said


def test_what_is_wrong_is_known_before_a_generation_and_before_the_run_directory(
    run_file, world, tmp_path
):
    world.max_samples = 5
    for arguments in ([], ["--dry-run"]):
        done = tandem("train", run_file, *arguments, check=2)
        assert "the trainer's max_samples is 5" in done.stderr
    assert not (tmp_path / "run").exists()
    assert {method for method, _ in world.calls} <= {"GetServerInfo", "CheckObjective"}


def test_servers_that_are_not_there_are_all_named_and_exit_with_3(run_file):
    done = tandem(
        "train", run_file, "servers.trainer=127.0.0.1:1", "servers.rollout=['127.0.0.1:2']",
        "--json", check=3,
    )  # fmt: skip
    said = json.loads(done.stderr.splitlines()[-1])
    assert [problem["code"] for problem in said["problems"]] == ["UNAVAILABLE"] * 2


def test_a_dry_run_shows_the_objective_in_force(run_file, world, tmp_path):
    out = tandem("train", run_file, "--dry-run", "objective.dual_clip=3").stdout
    shown = yaml.safe_load(out)["objective"]
    assert shown["clip_ratio_low"] == 0.2
    assert shown["loss_kind"] == "ppo_clip"
    assert shown["dual_clip"] == 3
    assert not (tmp_path / "run").exists()
    assert "Generate" not in {method for method, _ in world.calls}


def test_a_checkpoint_that_is_not_there_is_known_before_a_server_starts(
    run_file, cluster, tmp_path
):
    nowhere = tmp_path / "nowhere"
    for arguments in (["train"], ["sft"], ["train", "--dry-run"]):
        done = tandem(*arguments, run_file, cluster, f"start_from={nowhere}", check=2)
        assert f"start_from: {nowhere} is neither a checkpoint nor a run" in done.stderr
        assert not (tmp_path / "run").exists()
    done = tandem("eval", run_file, cluster, "--checkpoint", nowhere, check=2)
    assert done.stderr.startswith(f"tandem: --checkpoint: {nowhere} is neither a checkpoint")


def test_a_dry_run_says_that_the_run_directory_is_taken(run_file):
    tandem("train", run_file, "steps=1")
    assert "already holds a run" in tandem("train", run_file, "--dry-run", check=2).stderr


@pytest.mark.parametrize("purpose", ["train", "sft", "eval"])
def test_a_tokenizer_of_another_model_is_refused(load, world, tmp_path, purpose):
    codec = TextCodec(fakes.write_tokenizer(tmp_path / "model"))
    world.vocabulary_digest = codec.vocabulary_digest
    with Session(load(), purpose=purpose):
        pass
    world.vocabulary_digest = "0" * 32
    said = problems(load(), purpose=purpose)
    assert f"tokenizer: {tmp_path / 'model'} has 64 tokens and is not the tokenizer of" in said
    assert "the trainer at" in said
    assert "the rollout server at" in said


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(load, monkeypatch):
    monkeypatch.setattr(fakes, "VOCABULARY", 60)
    assert "whose vocabulary has 60" in problems(load())


def test_the_digest_of_a_vocabulary_is_that_of_the_contract(tmp_path):
    import xxhash

    codec = TextCodec(fakes.write_tokenizer(tmp_path))
    pieces = ["<eos>", *(f"w{i}" for i in range(1, 64))]
    text = "".join(f"{number} {piece}\n" for number, piece in enumerate(pieces))
    assert codec.vocabulary_digest == xxhash.xxh3_128_hexdigest(text.encode())
    assert codec.vocabulary_size == 64


@pytest.mark.parametrize(
    ("purpose", "override", "says"),
    [
        ("train", "batch.samples_per_prompt=20", "batch.samples_per_prompt: the 20 samples"),
        ("train", "batch.prompts_per_step=40", "batch: a step has 80 samples"),
        ("train", "objective.num_mini_batches=7", "objective.num_mini_batches: 7, a step has 6 sa"),
        ("sft", "sft.batch_size=65", "sft.batch_size: a step has 65 samples"),
        ("eval", "eval.samples=17", "eval.samples: the 17 samples"),
    ],
)
def test_a_step_that_the_servers_cannot_take_is_refused(load, world, purpose, override, says):
    world.max_samples, world.max_queue = 64, 16
    assert says in problems(load(override), purpose=purpose)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["kl_control={}"], "kl_control: is for a KL, and objective.kl_coefficient is not set"),
        (["kl_control={}", "objective.kl_coefficient=0"], "kl_control: is for a KL"),
        (["reference=junior"], "reference: is for a KL, and objective.kl_coefficient is not set"),
        (
            ["kl_control={horizon: 5}", "objective.kl_coefficient=0.1"],
            "kl_control.horizon: 5 responses, a step alone has 6",
        ),
    ],
)
def test_a_kl_that_the_objective_does_not_have_is_refused(load, overrides, says):
    assert says in problems(load(*overrides))
    with Session(load(*overrides), purpose="sft"):
        pass  # It has no KL.


def test_a_reference_that_the_trainer_publishes_to_is_refused(load):
    [address] = load().servers.rollout
    said = problems(load(f"reference={address}", "objective.kl_coefficient=0.1"))
    assert said.startswith(f"reference: {address} is one of servers.rollout")


def test_a_reference_that_does_not_answer_is_named_before_a_cluster_starts(load, cluster):
    run = load(cluster, "reference='127.0.0.1:1'", "objective.kl_coefficient=0.1")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"), Session(run, dry_run=True):
        pass


def test_a_reference_with_another_vocabulary_is_refused(load, tmp_path):
    other = fakes.FakeWorld()
    other.vocabulary_digest = "0" * 32
    with fakes.serve(other) as address:
        said = problems(load(f"reference='{address}'", "objective.kl_coefficient=0.1"))
    assert f"is not the tokenizer of the reference at {address}" in said


def test_the_junior_is_a_reference_where_every_rollout_server_has_the_same(load, world, cluster):
    asked = ["reference=junior", "objective.kl_coefficient=0.1"]
    with Session(load(*asked)):
        pass
    said = problems(load(cluster, *asked))
    assert said == "reference: junior: cluster.rollout.0 has no junior"
    [address] = load().servers.rollout
    other = fakes.FakeWorld()
    other.junior_version = "another"
    with fakes.serve(other) as second:
        both = f"servers.rollout=['{address}', '{second}']"
        said = problems(load(*asked, both))
    assert "reference: junior: the rollout servers have different juniors" in said
    assert f"the rollout server at {second} has another" in said
    world.has_junior = False
    said = problems(load(*asked))
    assert said == f"reference: junior: the rollout server at {address} has no junior"


def test_a_cluster_is_checked_before_it_starts(load, cluster):
    said = problems(
        load(
            cluster,
            "cluster.trainer.typo=1",
            "objective.junior_kl_coefficient=0.1",
            "eval.samples=17",
        )
    )
    assert said == "cluster.trainer: typo: unknown key"
    said = problems(load(cluster, "objective.junior_kl_coefficient=0.1", "cluster.rollout.typo=1"))
    assert "  - objective.junior_kl_kind: needs the junior" in said
    assert "  - cluster.rollout.0: typo: unknown key" in said
    assert "eval.samples: the 17" in problems(load(cluster, "eval.samples=17"))


MODES = "eval.modes=[solo, handoff, legibility]"


@pytest.mark.parametrize(
    ("purpose", "overrides", "needed"),
    [
        ("eval", [MODES], True),
        ("eval", ["eval.modes=[solo]"], False),
        ("train", [MODES, "eval.every=2"], True),
        # Nothing is evaluated in this run.
        ("train", [MODES], False),
        ("sft", [MODES, "eval.every=2"], True),
    ],
)
def test_evaluations_that_need_a_junior_are_refused_without_one(
    load, world, cluster, purpose, overrides, needed
):
    world.has_junior = False
    missing = "eval.modes: handoff, legibility: {} has no junior"
    if not needed:
        with Session(load(*overrides), purpose=purpose):
            pass
        with Session(load(cluster, *overrides), purpose=purpose, dry_run=True):
            pass
        return
    address = load().servers.rollout[0]
    said = problems(load(*overrides), purpose=purpose)
    assert said == missing.format(f"the rollout server at {address}")
    said = problems(load(cluster, *overrides), purpose=purpose)
    assert said == missing.format("cluster.rollout.0")
    with Session(
        load(cluster, "cluster.rollout.junior_model=j", *overrides), purpose=purpose, dry_run=True
    ):
        pass


@pytest.mark.parametrize("text", ["\n\n", "w1 w2"])
def test_a_handoff_needs_a_token_to_hand_over_at(load, cluster, tmp_path, text):
    boundary = f"eval.handoff_boundary={json.dumps(text)}"
    missing = f"eval.handoff_boundary: no token of {tmp_path / 'model'} ends with {text!r}"
    junior = "cluster.rollout.junior_model=j"
    for overrides in (boundary,), (cluster, junior, boundary):
        said = problems(load("eval.modes=[handoff]", *overrides), purpose="eval")
        assert said.startswith(missing)
        # Where there is no handoff nobody asks.
        settings = load("eval.modes=[legibility]", *overrides)
        with Session(settings, purpose="eval", dry_run=True):
            pass


def test_answers_that_nobody_judges_need_no_reward(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1"}\n')
    assert "exact_match needs an `answer`" in problems(load(), purpose="eval")
    with Session(load("eval.modes=[legibility]"), purpose="eval"):
        pass


def test_a_dry_run_starts_no_server_and_shows_the_objective(load, cluster):
    with Session(load(cluster, "objective.dual_clip=3"), dry_run=True) as session:
        assert session.objective["clip_ratio_low"] == 0.25
        assert session.objective["dual_clip"] == 3
    # The stand-ins cannot serve.
    with pytest.raises(ServerStartError, match="this one is not started"), Session(load(cluster)):
        pass


def test_a_model_of_the_cluster_with_another_tokenizer_is_refused(load, cluster, tmp_path):
    other = fakes.write_tokenizer(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w2"], vocabulary["w3"] = vocabulary["w3"], vocabulary["w2"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = problems(load(cluster, f"cluster.trainer.model={other}"))
    assert f"is not the tokenizer of cluster.trainer ({other})" in said


def test_one_problem_stays_what_it_is():
    collected = preflight.Problems()
    with collected.collect():
        raise ServerStartError("one")
    with pytest.raises(ServerStartError, match="one"):
        collected.raise_any()
    with collected.collect():
        raise ProblemsError([ConfigError("two"), ConfigError("three")])
    with pytest.raises(ProblemsError, match=r"^3 problems:"):
        collected.raise_any()
