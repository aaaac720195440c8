"""Mistakes that are found before anything is started, generated or written."""

import json
import shutil
import stat
import sys

import fakes
import numpy as np
import pytest
import yaml
from commands import tandem
from safetensors.numpy import save_file

from tandem._proto.types.v1 import server_pb2
from tandem.data.dataset import Dataset, Example
from tandem.errors import ConfigError, ProblemsError, ServerStartError, UnavailableError
from tandem.models.tokenizer import TextCodec
from tandem.preflight.problems import Problems
from tandem.preflight.vocabulary import check_prompt_ids, check_vocabulary
from tandem.session.opening import check_run, open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings

# A stand-in for the servers that knows --check-config alone.
CHECKER = """#!{python}
import json, sys, yaml
config = yaml.safe_load(open(sys.argv[2]))
def bad(message):
    print("tandem-x-server: bad configuration:", message, file=sys.stderr); sys.exit(2)
if "--check-config" not in sys.argv:
    print("this one is not started"); sys.exit(1)
if "typo" in config:
    bad(sys.argv[2] + ": typo: unknown key")
defaults = {{"max_samples": 64, "max_queue": 16, "junior_model": "", "max_model_len": 128}}
defaults["tandem"] = {{"enabled": True, "selection_strategy": "bernoulli", "prob_senior": 0.5}}
print(yaml.safe_dump(defaults | config), end="")
print("# Memory that this configuration needs:")
if "--check-objective" in sys.argv:
    objective = json.loads(sys.argv[sys.argv.index("--check-objective") + 1])
    if objective.get("junior_kl_coefficient"):
        bad("policy.junior_kl_kind: needs the junior")
    objective.pop("reference_logprobs", None)
    if "old_logprobs" in objective:
        objective["old_logprobs"] = "OLD_LOGPROBS_" + objective["old_logprobs"].upper()
    print(json.dumps({{"clip_ratio_low": 0.25}} | objective))
"""


@pytest.fixture
def load(run_file):
    return lambda *overrides: loading.load(RunSettings, run_file, overrides)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """An override that names a cluster file, whose servers are stand-ins that only check it."""
    for role in ("rollout", "trainer", "critic"):
        path = tmp_path / "build" / "bin" / f"tandem-{role}-server"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CHECKER.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TANDEM_BUILD_DIR", str(tmp_path / "build"))
    model = str(tmp_path / "model")
    file = tmp_path / "cluster.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "rollout": {"senior_model": model, "junior_model": model},
                "trainer": {"model": model},
            }
        )
    )
    return f"cluster={file}"


def problems(config, *, dry_run=False, **options):
    """The message of the error with which a session of these settings is refused."""
    with pytest.raises(ConfigError) as caught:
        if dry_run:
            check_run(config, **options)
        else:
            with open_session(config, **options):
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
    assert "batch: a step has 6 samples, but the trainer's max_samples is 5" in said


def test_without_a_tokenizer_the_other_problems_are_still_named(load, tmp_path):
    said = problems(load("tokenizer=/nowhere", f"data.jsonl={tmp_path / 'nothing.jsonl'}"))
    assert "tokenizer: /nowhere/tokenizer.json does not exist" in said
    assert "nothing.jsonl: No such file" in said


def test_problems_are_found_before_a_generation_and_before_the_run_directory(
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


def test_a_dry_run_shows_the_objective_with_the_servers_defaults(run_file, world, tmp_path):
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
    with open_session(load(), purpose=purpose):
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
    tokens = ["<eos>", *(f"w{i}" for i in range(1, 64))]
    text = "".join(f"{number} {token}\n" for number, token in enumerate(tokens))
    assert codec.vocabulary_digest == xxhash.xxh3_128_hexdigest(text.encode())
    assert codec.vocabulary_size == 64


@pytest.mark.parametrize(
    ("purpose", "override", "says"),
    [
        ("train", "batch.samples_per_prompt=20", "batch.samples_per_prompt: the 20 samples"),
        ("train", "batch.prompts_per_step=40", "batch: a step has 80 samples"),
        ("train", "objective.num_mini_batches=7", "objective.num_mini_batches: 7, but a step has "),
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
        (
            ["kl_control={}"],
            "kl_control: only applies to a KL, but objective.kl_coef",
        ),
        (["kl_control={}", "objective.kl_coefficient=0"], "kl_control: only applies to a KL"),
        (
            ["reference=junior"],
            "reference: only applies to a KL, but objective.kl_coef",
        ),
        (
            ["kl_control={horizon: 5}", "objective.kl_coefficient=0.1"],
            "kl_control.horizon: 5 responses, but a single step has 6",
        ),
    ],
)
def test_a_kl_that_the_objective_does_not_have_is_refused(load, overrides, says):
    assert says in problems(load(*overrides))
    with open_session(load(*overrides), purpose="sft"):
        pass  # Supervised training has no KL, so its settings do not matter.


def test_importance_weights_that_are_all_1_are_refused(load, cluster, subtests):
    for overrides, refused in [
        (["tandem.enabled=false"], True),
        (["tandem.enabled=false", "objective.old_logprobs=author"], True),
        (["objective.junior_token_loss_weight=0"], True),
        (["objective.old_logprobs=author"], True),
        (["objective.junior_token_loss_weight=1"], False),
        (["tandem.enabled=false", "sampling.top_p=0.9"], False),
        (["tandem.enabled=false", "sampling.top_p=0.9", "sampling.temperature=0"], True),
        (["tandem.enabled=false", "objective.old_logprobs=recomputed"], False),
        (["tandem.enabled=false", "objective.importance_sampling_floor=2"], False),
    ]:
        with subtests.test(overrides=overrides, refused=refused):
            cap = ["objective.importance_sampling_cap=3", "objective.old_logprobs=senior"]
            for where in ([], [cluster]):
                run = load(*where, *cap, *overrides)
                if refused:
                    assert "objective.importance_sampling_cap: has no effect" in problems(
                        run, dry_run=True
                    )
                else:
                    check_run(run)


def test_a_reference_that_the_trainer_publishes_to_is_refused(load):
    [address] = load().servers.rollout
    said = problems(load(f"reference={address}", "objective.kl_coefficient=0.1"))
    assert said.startswith(f"reference: {address} is one of servers.rollout")


def test_a_reference_that_does_not_answer_is_named_before_a_cluster_starts(load, cluster):
    run = load(cluster, "reference='127.0.0.1:1'", "objective.kl_coefficient=0.1")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        check_run(run)


def test_a_reference_with_another_vocabulary_is_refused(load):
    other = fakes.FakeWorld()
    other.vocabulary_digest = "0" * 32
    with fakes.serve(other) as address:
        said = problems(load(f"reference='{address}'", "objective.kl_coefficient=0.1"))
    assert f"is not the tokenizer of the reference at {address}" in said


def test_the_junior_is_a_reference_where_every_rollout_server_has_the_same(load, world, cluster):
    asked = ["reference=junior", "objective.kl_coefficient=0.1"]
    with open_session(load(*asked)):
        pass
    alone = "tandem.enabled=false"
    said = problems(load(cluster, *asked, alone, "cluster.rollout.junior_model=''"))
    assert said == "reference: junior: cluster.rollout has no junior"
    [address] = load().servers.rollout
    other = fakes.FakeWorld()
    other.junior_version = "another"
    with fakes.serve(other) as second:
        both = f"servers.rollout=['{address}', '{second}']"
        said = problems(load(*asked, both))
    assert "reference: junior: the rollout servers have different juniors" in said
    assert f"the rollout server at {second} has another" in said
    world.has_junior = False
    said = problems(load(*asked, alone))
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
    assert "  - cluster.rollout: typo: unknown key" in said
    assert "eval.samples: the 17" in problems(load(cluster, "eval.samples=17"))


MODES = "eval.modes=[solo, handoff, legibility]"


@pytest.mark.parametrize(
    ("purpose", "overrides", "needed"),
    [
        ("eval", [MODES], True),
        ("eval", ["eval.modes=[solo]"], False),
        ("train", [MODES, "eval.every=2"], True),
        # This run evaluates nothing.
        ("train", [MODES], False),
        ("sft", [MODES, "eval.every=2"], True),
    ],
)
def test_evaluations_that_need_a_junior_are_refused_without_one(
    load, world, cluster, purpose, overrides, needed
):
    world.has_junior = False
    overrides = [*overrides, "tandem.enabled=false"]
    cluster = [cluster, "cluster.rollout.junior_model=''"]
    missing = "eval.modes: handoff, legibility: {} has no junior"
    if not needed:
        with open_session(load(*overrides), purpose=purpose):
            pass
        check_run(load(*cluster, *overrides), purpose=purpose)
        return
    address = load().servers.rollout[0]
    said = problems(load(*overrides), purpose=purpose)
    assert said == missing.format(f"the rollout server at {address}")
    said = problems(load(*cluster, *overrides), purpose=purpose)
    assert said == missing.format("cluster.rollout")
    paired = load(*cluster, "cluster.rollout.junior_model=j", *overrides)
    check_run(paired, purpose=purpose)


@pytest.mark.parametrize("text", ["\n\n", "w1 w2"])
def test_a_handoff_needs_a_token_to_hand_over_at(load, cluster, tmp_path, text):
    boundary = f"eval.handoff_boundary={json.dumps(text)}"
    missing = f"eval.handoff_boundary: no token of {tmp_path / 'model'} ends with {text!r}"
    for overrides in (boundary,), (cluster, boundary):
        said = problems(load("eval.modes=[handoff]", *overrides), purpose="eval")
        assert said.startswith(missing)
        # Without a handoff the boundary does not matter.
        settings = load("eval.modes=[legibility]", *overrides)
        check_run(settings, purpose="eval")


def test_answers_that_nobody_judges_need_no_reward(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1"}\n')
    assert "exact_match needs an `answer`" in problems(load(), purpose="eval")
    with open_session(load("eval.modes=[legibility]"), purpose="eval"):
        pass


def test_a_dry_run_starts_no_server_and_shows_the_objective(load, cluster):
    checked = check_run(load(cluster, "objective.dual_clip=3"))
    objective = checked.in_force["objective"]
    assert (objective["clip_ratio_low"], objective["dual_clip"]) == (0.25, 3)
    assert checked.in_force["tandem"]["prob_senior"] == 0.5
    # The stand-ins cannot serve.
    with (
        pytest.raises(ServerStartError, match="this one is not started"),
        open_session(load(cluster)),
    ):
        pass


def test_a_model_of_the_cluster_with_another_tokenizer_is_refused(load, cluster, tmp_path):
    other = fakes.write_tokenizer(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w2"], vocabulary["w3"] = vocabulary["w3"], vocabulary["w2"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = problems(load(cluster, f"cluster.trainer.model={other}"))
    assert f"is not the tokenizer of cluster.trainer.model ({other})" in said


def test_one_problem_keeps_its_type_and_several_are_joined():
    collected = Problems()
    with collected.collect():
        raise ServerStartError("one")
    with pytest.raises(ServerStartError, match="one"):
        collected.raise_any()
    with collected.collect():
        raise ProblemsError([ConfigError("two"), ConfigError("three")])
    with pytest.raises(ProblemsError, match=r"^3 problems:"):
        collected.raise_any()


def test_a_run_with_tandem_and_without_a_junior_is_refused_with_the_setting_to_change(
    run_file, load, world, cluster, tmp_path
):
    alone = "cluster.rollout.junior_model=''"
    hint = "tandem.enabled: false trains only the senior"
    for arguments in ([], ["--dry-run"]):
        done = tandem("train", run_file, cluster, alone, *arguments, check=2)
        assert "tandem: tandem.enabled: cluster.rollout has no junior" in done.stderr
        assert hint in done.stderr
        assert not (tmp_path / "run").exists()
    check_run(load(cluster, alone, "tandem.enabled=false"))
    # Supervised training draws no samples, or those of the senior alone.
    for responses in ("rows", "senior"):
        run = load(cluster, alone, f"sft.responses={responses}")
        check_run(run, purpose="sft")
    world.has_junior = False
    done = tandem("train", run_file, check=2)
    assert "tandem.enabled: the rollout server at" in done.stderr
    assert hint in done.stderr
    assert not (tmp_path / "run").exists()
    assert "Generate" not in {method for method, _ in world.calls}


def test_a_prompt_that_the_servers_of_a_cluster_cannot_hold_is_known_before_they_start(
    load, cluster, tmp_path
):
    row = {"prompt": " ".join(["w1"] * 50), "answer": "w1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    check_run(load(cluster))
    for length in (
        "trainer.max_model_len",
        "rollout.max_model_len",
        "rollout.junior_max_model_len",
    ):
        said = problems(load(cluster, f"cluster.{length}=50"))
        assert f"data: {tmp_path / 'rows.jsonl'}:1: the prompt has 50 tokens, but the ser" in said
    # A run without the junior is not bound by its limit.
    alone = ["tandem.enabled=false", "cluster.rollout.junior_max_model_len=50"]
    check_run(load(cluster, *alone))
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 40}')
    assert "the servers' max_model_len allows 39" in problems(load(cluster))


def test_responses_that_no_prompt_leaves_room_for_are_refused(load, cluster):
    said = problems(load("sampling.max_tokens=127"))
    assert said.startswith(
        "sampling.max_tokens: 127, but the servers' max_model_len of 128 leaves a response to the "
        "shortest prompt of data 126 tokens"
    )
    assert "shortest prompt of data 126 tokens" in problems(
        load(cluster, "sampling.max_tokens=127")
    )
    said = problems(load("eval.max_tokens=127", "eval.every=1"))
    assert said.startswith("eval.max_tokens: 127")
    with open_session(load("sampling.max_tokens=126")):
        pass


def test_the_limit_of_the_junior_bounds_a_run_that_uses_it(load, world):
    world.junior_max_model_len = 50
    said = problems(load("sampling.max_tokens=60"))
    assert said.startswith("sampling.max_tokens: 60, but the servers' max_model_len of 50 leaves")
    with open_session(load("sampling.max_tokens=60", "tandem.enabled=false")):
        pass
    with open_session(load("sampling.max_tokens=40")):
        pass


def test_prompts_that_leave_too_little_room_for_a_response_are_counted_in_a_warning(
    load, tmp_path, notes
):
    rows = [{"prompt": "w1 " * count, "answer": "w1"} for count in (1, 2, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open_session(load("sampling.max_tokens=120")):
        pass
    assert notes == [
        "warning: 1 of 3 prompts of data leave a response less than sampling.max_tokens (120) "
        "within the servers' max_model_len (128)"
    ]


def test_a_junior_with_another_tokenizer_is_refused(load, cluster, tmp_path):
    other = fakes.write_tokenizer(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["w64"] = 64
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for field in ("rollout.junior_model", "trainer.reference_model", "trainer.junior_model"):
        said = problems(load(cluster, f"cluster.{field}={other}"))
        assert f"is not the tokenizer of cluster.{field} ({other})" in said
    # The tokenizer is the same; the embedding has padding rows.
    shutil.copy(tmp_path / "model" / "tokenizer.json", other)
    (other / "config.json").write_text('{"vocab_size": 128}')
    check_run(load(cluster, f"cluster.rollout.junior_model={other}"))


def test_a_tokenizer_with_more_ids_than_embeddings_is_that_of_its_model(tmp_path):
    codec = TextCodec(fakes.write_tokenizer(tmp_path))
    model = server_pb2.ModelInfo(
        path="m", num_token_ids=62, vocabulary_digest=codec.vocabulary_digest
    )
    check_vocabulary(codec, model, "trainer")
    rows = [Example({}, "", [1, 61], place="rows:1"), Example({}, "", [3, 63, 62], place="rows:2")]
    check_prompt_ids(codec, {"data": Dataset(rows[:1])}, model, "trainer")
    with pytest.raises(
        ConfigError, match=r"data: rows:2: .* 'w63' \(63\), but trainer only has"
    ) as said:
        check_prompt_ids(codec, {"data": Dataset(rows)}, model, "trainer")
    assert "below 62" in str(said.value)
    # Without a digest the number of ids is all there is to compare.
    for digest in ("", "0" * 32):
        model.vocabulary_digest = digest
        with pytest.raises(ConfigError, match="is not the tokenizer of trainer"):
            check_vocabulary(codec, model, "trainer")


def test_trainer_and_rollout_servers_of_two_models_are_refused(load, cluster, tmp_path):
    model, other = tmp_path / "model", fakes.write_tokenizer(tmp_path / "other")
    for directory, value in ((model, 1.0), (other, 2.0)):
        save_file({"norm": np.full(3, value, np.float32)}, directory / "model.safetensors")
    said = problems(load(cluster, f"cluster.trainer.model={other}"))
    assert said == (
        f"cluster.rollout.senior_model ({model}) and cluster.trainer.model ({other}) name "
        "different models: norm differs"
    )
    shutil.copy(model / "model.safetensors", other)
    check_run(load(cluster, f"cluster.trainer.model={other}"))


def test_running_servers_of_two_models_are_refused(load, world):
    world.rollout_weights = fakes.weights(0, "other")
    said = problems(load())
    assert "hold different models" in said
    with open_session(load("start_from=served")):
        pass
    # The digest of trained weights does not tell the model that training began with.
    world.rollout_weights = fakes.weights(3, "other")
    with open_session(load()):
        pass


def test_a_text_to_learn_is_checked_before_a_server_starts(
    run_file, cluster, world, tmp_path, subtests
):
    for local in [False, True]:
        for row, overrides, says in [
            ('"reply": "w3"', [], "the row has no 'answer'; its columns are prompt, reply"),
            ('"answer": null', [], "'answer' is null, not a text to learn"),
            ('"answer": ["w3"]', [], "'answer' is a list, not a text to learn"),
            ('"answer": {}', [], "'answer' is a mapping, not a text to learn"),
            ('"answer": ""', ["sft.append_eos=false"], "the text to learn is empty"),
            ('"answer": 3', ["sft.response='{answer:%Y}'"], "'{answer:%Y}' does not fit the row"),
            (
                f'"answer": "{"w3 " * 126}"',
                [],
                "prompt and response have 129 tokens, but the servers' max_model_len allows 128",
            ),
        ]:
            with subtests.test(row=row, overrides=overrides, says=says, local=local):
                world.max_model_len = 128
                rows = tmp_path / "rows.jsonl"
                first = '{"prompt": "w1", "answer": "2000-01-01"}\n' if "%Y" not in says else ""
                rows.write_text(first + '{"prompt": "w1 w2", ' + row + "}\n")
                where = f"sft.response: {rows}:{1 + bool(first)}: "
                arguments = [run_file, "--dry-run", *overrides, *([cluster] if local else [])]
                done = tandem("sft", *arguments, check=2)
                assert where + says in done.stderr
                assert done.stderr.count(str(rows)) == 1
                assert not (tmp_path / "run").exists()


def test_texts_to_learn_that_are_bad_in_one_way_are_named_once(run_file, tmp_path):
    done = tandem("sft", run_file, "--dry-run", "sft.response='{reply}'", check=2)
    first = f"tandem: sft.response: {tmp_path}/rows.jsonl:1: the row has no 'reply'"
    assert done.stderr.startswith(first)
    assert "more rows)" in done.stderr
    assert done.stderr.count("has no 'reply'") == 1
    done = tandem("sft", run_file, "--dry-run", "sft.response='{answer'", check=2)
    assert "sft.response: '{answer': expected '}' before end of string" in done.stderr


@pytest.mark.parametrize("local", [False, True])
def test_what_the_senior_s_own_responses_need_is_checked_before_a_server_starts(
    load, cluster, world, tmp_path, local
):
    # They need no column of the rows but the prompt's.
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1 w2"}\n')
    where = [cluster] if local else []
    own = [*where, "sft.responses=senior"]
    checked = check_run(load(*own), purpose="sft")
    assert not local or len(checked.in_force["cluster"]["rollout"]) == 1
    said = problems(load(*own, "sampling.max_tokens=127"), purpose="sft", dry_run=True)
    assert said.startswith("sampling.max_tokens: 127, but the servers' max_model_len of 128")
    said = problems(load(*own, "speculative.method=heads"), purpose="sft", dry_run=True)
    assert said.startswith("speculative.method: heads: ")
    assert "has no speculator" in said
    if local:
        said = problems(load(*own, "cluster.rollout=[]"), purpose="sft", dry_run=True)
        assert said == "cluster.rollout: a run needs a rollout server"
    else:
        world.rollout_weights = fakes.weights(0, "other")
        assert "hold different models" in problems(load(*own), purpose="sft")


def test_a_run_starts_the_servers_that_it_uses(load, cluster, notes):
    run = load(cluster, "cluster.critic={model: m}")
    checked = check_run(run, purpose="sft")
    started = checked.in_force["cluster"]
    assert "critic" not in started
    assert started["rollout"] == []
    assert any(note.startswith("this run needs no critic (objective.adv") for note in notes)
    assert any(note.startswith("this run draws no responses (evaluations") for note in notes)
    assert not any("is not started" in note for note in notes)
    assert any(note.startswith("servers.rollout is not used") for note in notes)


def test_settings_of_tandem_without_an_effect_are_warned_of(load, cluster, notes):
    for where in ([], [cluster]):
        notes.clear()
        run = load(*where, "tandem.selection_strategy=sentence", "tandem.prob_senior=0.3")
        check_run(run)
        warning = "warning: tandem.prob_senior has no effect with selection_strategy: sentence"
        assert notes.count(warning) == 1


def test_an_answer_pattern_without_an_effect_is_warned_of(load, tmp_path, notes):
    (tmp_path / "judge.py").write_text("def reward(prompt, response, **row):\n    return 1\n")
    function = f"reward.function={tmp_path / 'judge.py'}:reward"
    check_run(load(function, "reward.answer_pattern=w."))
    check_run(load("reward.answer_pattern=w."))
    [note] = notes
    assert note.startswith(
        f"warning: reward.answer_pattern has no effect with {tmp_path}/judge.py:"
    )


def test_a_dry_run_shows_the_defaults_of_the_servers(run_file, cluster, tmp_path):
    shown = yaml.safe_load(tandem("train", run_file, "--dry-run", cluster).stdout)
    assert shown["tandem"]["selection_strategy"] == "bernoulli"
    assert shown["tandem"]["prob_senior"] == 0.5
    assert shown["sampling"]["temperature"] == 1.0
    assert shown["cluster"]["trainer"] == {"model": str(tmp_path / "model")}
    assert shown["servers"] == {"timeout_seconds": 3600.0}
    shown = yaml.safe_load(tandem("train", run_file, "--dry-run").stdout)
    assert "cluster" not in shown
    assert shown["servers"]["trainer"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("speculative", []),
        ("eval.speculative", ["eval.every=2"]),
    ],
)
def test_drafts_of_a_model_that_no_server_has_are_refused(load, world, cluster, field, overrides):
    world.has_junior = False
    overrides = [*overrides, "tandem.enabled=false"]
    address = load().servers.rollout[0]
    for method, lacks in (("junior", "junior"), ("heads", "speculator")):
        asked = f"{field}.method={method}"
        said = problems(load(*overrides, asked))
        assert said == f"{field}.method: {method}: the rollout server at {address} has no {lacks}"
    alone = [cluster, "cluster.rollout.junior_model=''", *overrides]
    said = problems(load(*alone, f"{field}.method=heads"))
    assert said == f"{field}.method: heads: cluster.rollout has no speculator"
    with open_session(load(*overrides, f"{field}.method=ngram")):
        pass


@pytest.mark.parametrize("purpose", ["train", "sft"])
def test_an_end_token_that_ends_no_response_is_noted(load, world, purpose, notes):
    """Once, for all servers with the same ids."""

    def told(*overrides):
        notes.clear()
        overrides = ["sft.response='{prompt}'", "tandem.enabled=false", *overrides]
        check_run(load(*overrides), purpose=purpose)
        return [text for text in notes if "end-of-sequence" in text]

    assert told() == []
    world.eos_token_ids = [7, 5]
    noted = told()
    assert noted
    assert all("token '<eos>' (id 0) does not end responses of the " in text for text in noted)
    assert all("end at the ids 5, 7;" in text for text in noted)
    world.eos_token_ids = []
    assert "responses end at no token" in told()[0]
    asked = {"train": "sampling.stop=['<eos>']", "sft": "sft.append_eos=false"}
    ignored = {"train": "sampling.ignore_eos=true", "sft": "sft.append_eos=false"}
    assert told(asked[purpose]) == told(ignored[purpose]) == []


@pytest.mark.parametrize(
    ("config", "generation", "noted"),
    [
        ({"eos_token_id": 0}, {}, False),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 0]}, False),
        ({"text_config": {"eos_token_id": 0}}, {}, False),
        ({"eos_token_id": 5}, {"eos_token_id": [7]}, True),
        ({}, {}, True),
    ],
)
def test_the_end_tokens_of_a_clusters_models_are_those_of_their_files(
    load, cluster, tmp_path, config, generation, noted, notes
):
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    check_run(load(cluster))
    assert any("does not end responses" in text for text in notes) == noted


def test_greedy_samples_of_an_evaluation_are_noted(load, notes):
    def told(purpose, *overrides):
        notes.clear()
        check_run(load(*overrides), purpose=purpose)
        return [text for text in notes if "eval.samples" in text]

    several = ("eval.samples=4", "eval.k=[1, 4]")
    [note] = told("eval", *several)
    assert note.startswith("warning: eval.samples: the 4 answers to a prompt are the same")
    assert len(told("train", *several, "eval.every=2")) == 1
    assert told("train", *several, "eval.every=0") == []
    assert told("eval") == told("eval", *several, "eval.temperature=0.5") == []


def test_a_directory_that_is_not_there_is_one_problem(tmp_path):
    def collected(*messages):
        found = Problems([tmp_path / "no", tmp_path / "other"])
        found.errors = [ConfigError(one, hint="import it") for one in messages]
        with pytest.raises(ConfigError) as caught:
            found.raise_any()
        return str(caught.value)

    said = [
        f"tokenizer: {tmp_path}/no/tokenizer.json does not exist",
        f"cluster.rollout: senior_model: cannot open {tmp_path}/no/config.json: No such file",
        f"cluster.trainer: model: {tmp_path}/no",
    ]
    fields = "tokenizer, cluster.rollout.senior_model, cluster.trainer.model"
    assert collected(*said) == f"{tmp_path}/no does not exist: {fields}"
    both = collected(*said, f"critic: {tmp_path}/no/other/config.json: No such file")
    assert both.count("\n  - ") == 2
    (tmp_path / "no").mkdir()
    assert collected(*said) == f"{tmp_path}/no has no model: {fields}"
    # A model that is there may have several faults.
    (tmp_path / "no" / "config.json").touch()
    assert collected(*said).startswith("3 problems")
