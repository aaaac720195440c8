"""Runs one after the other on the same servers, and servers that restart during a run."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys

import harness
import numpy as np
import pytest
from harness import metrics_without_clock, restart, run_on, wait_until
from tandem.errors import ConfigError, FailedPreconditionError, TandemError, UnsavedUpdatesError
from tandem.evaluation import evaluate
from tandem.models.tokenizer import TextCodec
from tandem.run_directory.directory import RunDirectory
from tandem.run_directory.mirror import restore_run
from tandem.run_directory.stored_checkpoints import checkpoints_in
from tandem.run_directory.trajectories.files import read_records
from tandem.session.opening import check_run, open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.settings.values import apply_override
from tandem.training.loop import train
from tandem.training.start import serve_checkpoint


def test_every_run_on_running_servers_begins_with_the_base_model(fresh_pair, models, tmp_path):
    """The second run repeats the first: it starts from the same weights, moments and version."""
    first = run_on(fresh_pair, models, tmp_path / "first")
    assert run_on(fresh_pair, models, tmp_path / "second") == first
    assert first[0]["version/senior"] == 1


def test_a_critic_begins_anew_with_its_run(models, tmp_path):
    with harness.cluster(tmp_path / "cluster", models, trainer={}, critic={}) as running:
        objective = {"advantage_estimator": "gae"}
        first = run_on(running, models, tmp_path / "first", objective=objective)
        assert run_on(running, models, tmp_path / "second", objective=objective) == first


def test_a_ppo_run_with_shared_prefixes_is_the_run_without(models, tmp_path):
    """Rollout, trainer and critic; values, too, are of prompts that a group has in common."""
    runs = []
    for shares in (False, True):
        settings = {"batch": {"shared_prefixes": shares}}
        with harness.cluster(
            tmp_path / f"cluster-{shares}", models, trainer=settings, critic=settings
        ) as running:
            objective = {"advantage_estimator": "gae"}
            runs.append(run_on(running, models, tmp_path / f"{shares}", objective=objective))
    apart, shared = runs
    for line in shared:
        assert line.pop("policy/shared_token_fraction") > 0.2
    for line in apart:
        assert line.pop("policy/shared_token_fraction") is None
    harness.assert_metrics_close(shared, apart)


@pytest.mark.parametrize(("role", "every"), [("critic", 1), ("critic", 2), ("trainer", 2)])
def test_a_server_that_restarts_ends_a_ppo_run_which_resumes_to_the_same_bits(
    models, tmp_path, role, every
):
    """A restarted server holds its base model, which the run must neither train nor save.

    The other server still holds unsaved updates of the run, which the resumed run makes again.
    """
    with harness.cluster(tmp_path / "cluster", models, trainer={}, critic={}) as running:
        changes = {
            "objective": {"advantage_estimator": "gae"},
            "checkpoint": {"every": every},
            "steps": 4,
        }
        undisturbed = run_on(running, models, tmp_path / "whole", **changes)

        def on_step(line):
            if line["step"] == 3:
                # The checkpoint before is written beside this step; a kill would cost it.
                wait_until((tmp_path / "run" / "run" / "state.json").exists)
                restart(getattr(running, role))

        says = rf"the {role} at .* not the run's version [34]"
        with pytest.raises(FailedPreconditionError, match=says):
            run_on(running, models, tmp_path / "run", on_step=on_step, **changes)
        resumed = run_on(running, models, tmp_path / "run", resume=True, **changes)
        assert resumed == undisturbed


def test_a_run_resumes_on_an_empty_disk_from_its_copy_to_the_same_bits(
    fresh_pair, models, tmp_path
):
    url = f"file://{tmp_path}/store/run"
    copied = {"checkpoint": {"every": 1, "upload": url}}
    undisturbed = run_on(fresh_pair, models, tmp_path / "whole", steps=4)
    run_on(fresh_pair, models, tmp_path, steps=2, **copied)
    shutil.rmtree(tmp_path / "run")
    assert "checkpoint of step 2" in restore_run(tmp_path / "run", url)
    assert not (tmp_path / "run" / "trajectories").exists()
    assert run_on(fresh_pair, models, tmp_path, resume=True, steps=4, **copied) == undisturbed
    assert [one.step for one in checkpoints_in(url, "URL")] == [3, 4]
    assert not any(one.damage() for one in checkpoints_in(url, "URL"))


def test_a_run_starts_from_a_checkpoint_of_another_on_servers_that_have_done_more(
    fresh_pair, models, tmp_path
):
    whole = run_on(fresh_pair, models, tmp_path / "whole", steps=2, checkpoint={"every": 1})
    run_on(fresh_pair, models, tmp_path / "other")
    start = tmp_path / "whole" / "run" / "checkpoints" / "step_000001"
    again = run_on(fresh_pair, models, tmp_path / "again", steps=1, start_from=str(start))
    assert [line["version/senior"] for line in again] == [2]
    assert again[0]["policy/learning_rate"] == whole[1]["policy/learning_rate"]
    served = run_on(fresh_pair, models, tmp_path / "served", steps=1, start_from="served")
    assert [line["version/senior"] for line in served] == [3]


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_an_adaptive_kl_coefficient_survives_a_resume_bit_for_bit(
    fresh_pair, models, tmp_path, placement
):
    objective = {"kl_coefficient": 0.1, "kl_estimator": "k1", "num_epochs": 2}
    changes = {
        "objective": objective | {"kl_placement": placement},
        "reference": "junior",
        "kl_control": {"target": 8.0, "horizon": 20},
    }
    whole = run_on(fresh_pair, models, tmp_path / "whole", steps=4, **changes)
    run_on(fresh_pair, models, tmp_path / "parted", steps=2, **changes)
    parted = run_on(fresh_pair, models, tmp_path / "parted", steps=4, resume=True, **changes)
    assert parted == whole
    coefficients = [line["policy/kl_coefficient"] for line in whole]
    assert coefficients[0] == 0.1
    for line, following in itertools.pairwise(whole):
        # The trainer counts the tokens of each of the 12 responses in both epochs.
        kl = line["policy/kl_to_ref"] * line["policy/weighted_tokens"] / 2 / 12
        if placement == "reward":
            taken = line["policy/kl_coefficient"] * kl
            assert line["reward/kl_penalty"] == pytest.approx(taken, rel=1e-9)
        off = np.clip(kl / 8.0 - 1, -0.2, 0.2)
        assert off != 0
        expected = line["policy/kl_coefficient"] * (1 + off * 12 / 20)
        assert following["policy/kl_coefficient"] == pytest.approx(expected, rel=1e-12)


def test_checkpoints_can_be_evaluated_in_any_order_and_a_failure_breaks_nothing(
    fresh_pair, models, tmp_path
):
    config = harness.run_settings(tmp_path / "eval", models, fresh_pair)
    run_on(fresh_pair, models, tmp_path / "a", checkpoint={"every": 1})
    run_on(fresh_pair, models, tmp_path / "b", steps=1)
    checkpoints = tmp_path / "a" / "run" / "checkpoints"

    def measured(path):
        with open_session(config, purpose="eval") as session:
            start = serve_checkpoint(session, path)
            result = evaluate(session)["solo"]
        assert result.version == start.weights.version
        return result.grades.rewards

    newest, older = measured(tmp_path / "a" / "run"), measured(checkpoints / "step_000002")
    assert newest != older
    with pytest.raises(TandemError):
        measured(tmp_path / "nothing")
    assert measured(tmp_path / "a" / "run") == newest
    assert measured(checkpoints / "step_000002") == older
    run_on(fresh_pair, models, tmp_path / "c", steps=1)


def test_updates_that_no_checkpoint_has_are_kept(fresh_pair, models, tmp_path):
    save_nothing = {"every": 0, "at_end": False}
    run_on(fresh_pair, models, tmp_path / "first", steps=1, checkpoint=save_nothing)
    with pytest.raises(UnsavedUpdatesError, match=fresh_pair.trainer.address):
        run_on(fresh_pair, models, tmp_path / "second", steps=1)
    assert not (tmp_path / "second" / "run").exists()
    run_on(fresh_pair, models, tmp_path / "second", steps=1, start_from="base")


@pytest.mark.parametrize("phase", ["between two steps", "in a step"])
def test_a_rollout_server_that_restarts_changes_nothing(fresh_pair, models, tmp_path, phase):
    undisturbed = run_on(fresh_pair, models, tmp_path / "first")
    [rollout] = fresh_pair.rollouts
    if phase == "between two steps":

        def on_step(line):
            if line["step"] == 2:
                restart(rollout)

        disturbed = run_on(fresh_pair, models, tmp_path / "second", on_step=on_step)
    else:
        # The server is back at version 0 when it gets the prompts, which are then asked again.
        config = harness.run_settings(tmp_path / "second", models, fresh_pair)
        with RunDirectory.open(config, "train") as run, open_session(config) as session:
            pool, generated = session.rollouts, session.rollouts.generate

            def generate(prompts, *, admit, **rest):
                def admit_and_restart(client):
                    admit(client)
                    if generate.calls == 3:
                        restart(rollout)

                generate.calls += 1
                return generated(prompts, admit=admit_and_restart, **rest)

            generate.calls = 0
            pool.generate = generate
            train(session, run, lambda line: None)
        assert generate.calls == 4
        disturbed = metrics_without_clock(tmp_path / "second" / "run")
    assert disturbed == undisturbed


def test_a_trainer_that_restarts_ends_the_run_and_it_is_resumed(fresh_pair, models, tmp_path):
    undisturbed = run_on(fresh_pair, models, tmp_path / "first")

    def on_step(line):
        if line["step"] == 2:
            restart(fresh_pair.trainer)

    changes = {"checkpoint": {"every": 1}}
    with pytest.raises(FailedPreconditionError) as caught:
        run_on(fresh_pair, models, tmp_path / "second", on_step=on_step, **changes)
    assert caught.value.reason == "STALE_POLICY_VERSION"
    resumed = run_on(fresh_pair, models, tmp_path / "second", resume=True, **changes)
    assert resumed == undisturbed


def test_a_run_that_failed_goes_on_as_if_it_had_not(fresh_pair, models, tmp_path):
    undisturbed = run_on(fresh_pair, models, tmp_path / "first")

    def on_step(line):
        if line["step"] == 2:
            raise ConfigError("no more")

    with pytest.raises(ConfigError) as caught:
        run_on(fresh_pair, models, tmp_path / "second", on_step=on_step)
    assert caught.value.__notes__ == [
        "in step 2: saved after step 2, --resume continues from there"
    ]
    assert run_on(fresh_pair, models, tmp_path / "second", resume=True) == undisturbed


# Three of the ten prompts have rewards that differ; call number DIE_AT kills the process.
DYING_REWARD = """
import itertools, os, signal
calls = itertools.count(1)
def reward(prompt, response, **row):
    if next(calls) == int(os.environ.get("DIE_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return len(prompt) % 2 * len(response) / 10
"""


def test_a_run_killed_during_dynamic_sampling_resumes_as_if_it_had_not_been(
    fresh_pair, models, tmp_path
):
    judge = tmp_path / "judge.py"
    judge.write_text(DYING_REWARD)
    buffer = {"len": 8, "penalty_factor": 0.5}
    changes = {
        "steps": 5,
        "reward": {"function": f"{judge}:reward", "workers": 1, "overlong_buffer": buffer},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 4, "filter_groups": {}},
        "checkpoint": {"every": 2},
    }
    undisturbed = run_on(fresh_pair, models, tmp_path / "whole", **changes)
    drawn = [line["batch/groups_drawn"] for line in undisturbed]
    assert [line["batch/groups_dropped"] for line in undisturbed] == [n - 2 for n in drawn]
    assert all(line["reward/overlong_mean"] < 0 for line in undisturbed)
    # The run is killed in the second generation batch of step 4; no checkpoint holds step 3.
    assert undisturbed[3]["batch/num_gen_batches"] > 1
    config = harness.run_settings(tmp_path / "killed", models, fresh_pair, **changes)
    file = tmp_path / "run.yaml"
    file.write_text(loading.dump(config))
    killed = subprocess.run(
        [sys.executable, "-m", "tandem", "train", file],
        env=os.environ | {"DIE_AT": str(4 * (sum(drawn[:3]) + 2) + 1)},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = harness.json_lines(tmp_path / "killed" / "run" / "metrics.jsonl")
    assert [line["step"] for line in before] == [1, 2, 3]
    resumed = run_on(fresh_pair, models, tmp_path / "killed", resume=True, **changes)
    assert resumed == undisturbed
    for step in range(1, 6):
        name = f"run/trajectories/step_{step}.parquet"
        killed = (tmp_path / "killed" / name).read_bytes()
        assert killed == (tmp_path / "whole" / name).read_bytes()


def test_a_step_larger_than_the_queue_is_drawn_in_several_batches(models, tmp_path):
    whole = {}
    for name, max_queue in (("small", 4), ("large", 64)):
        rollout = {"max_queue": max_queue}
        with harness.cluster(tmp_path / name, models, rollout=rollout, trainer={}) as running:
            whole[name] = run_on(running, models, tmp_path / f"run-{name}", steps=1)
    assert whole["small"] == whole["large"]


def test_a_tokenizer_of_another_model_is_refused(fresh_pair, models, tmp_path):
    with open_session(harness.run_settings(tmp_path / "good", models, fresh_pair)) as session:
        digest = session.trainer.info().server.model.vocabulary_digest
    assert digest == TextCodec(models.senior).vocabulary_digest
    config = harness.run_settings(
        tmp_path, models, fresh_pair, tokenizer=str(models.other_vocabulary)
    )
    with (
        pytest.raises(ConfigError, match="is not the tokenizer of the trainer at"),
        open_session(config),
    ):
        pass


MISTAKES = [
    ({"objective": {"junior_kl_coefficient": 0.1}}, r"objective\.junior_kl_kind: needs the junior"),
    ({"objective": {"clip_ratio_low": -1.0}}, r"objective\.clip_ratio_low: "),
    ({"batch": {"samples_per_prompt": 5000}}, r"max_samples is 4,096"),
]
# The settings of running servers were checked when they started.
CLUSTER_MISTAKES = [
    ({"cluster.trainer.optimizer.learning_rate": -1}, r"cluster\.trainer: .*learning_rate"),
    ({"cluster.trainer.batch.logits_chunk_bytes": 10**12}, r"cluster\.trainer: .* GB are avail"),
    (
        {"cluster.rollout.junior_model": "''", "eval": {"modes": ["handoff"], "every": 1}},
        r"eval\.modes: handoff: cluster\.rollout has no junior",
    ),
]


@pytest.mark.parametrize(
    ("running", "changes", "says"),
    [(True, *case) for case in MISTAKES]
    + [(False, *case) for case in [*MISTAKES, *CLUSTER_MISTAKES]],
)
def test_a_dry_run_names_the_mistakes_that_servers_find(
    pair, models, tmp_path, running, changes, says
):
    """Running servers find them, and so do the binaries of servers that would be started."""
    values = harness.run_settings(tmp_path, models, pair if running else None).model_dump(
        mode="json"
    )
    if not running:
        servers = harness.sections(models, trainer={})
        values["cluster"] = {"directory": str(tmp_path / "cluster"), **servers}
    overrides = [f"{key}={value}" for key, value in changes.items() if key.startswith("cluster")]
    for key, value in changes.items():
        if not key.startswith("cluster"):
            values[key] = (values[key] or {}) | value
    for override in overrides:
        apply_override(values, override)
    config = loading.validate(RunSettings, values, "test")
    with pytest.raises(ConfigError, match=says):
        check_run(config)
    assert not (tmp_path / "cluster").exists()


def test_a_run_with_drafts_has_the_bits_of_one_without(fresh_pair, models, tmp_path):
    def trajectories(name):
        files = sorted((tmp_path / name / "run" / "trajectories").glob("*.parquet"))
        return [record for file in files for record in read_records(file)]

    plain = run_on(fresh_pair, models, tmp_path / "plain")
    without_drafts = trajectories("plain")
    assert {record.pop("accepted_draft_mask") for record in without_drafts} == {None}
    server = fresh_pair.rollouts[0]
    count = "tandem_draft_tokens_total"

    def drafts():
        lines = harness.metrics_text(server).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{count}{{"))

    for method in ("ngram", "junior"):
        before = drafts()
        speculative = {"method": method, "prompt_lookup_min": 1}
        assert run_on(fresh_pair, models, tmp_path / method, speculative=speculative) == plain
        recorded = trajectories(method)
        marks = [record.pop("accepted_draft_mask") for record in recorded]
        assert recorded == without_drafts != []
        assert list(map(len, marks)) == [len(record["response_token_ids"]) for record in recorded]
        assert drafts() > before
