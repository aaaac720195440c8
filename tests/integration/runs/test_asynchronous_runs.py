"""Asynchronous runs on real servers: the bits of a repeated, a killed and a resumed run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import drafts
import harness
import numpy as np
import pytest
from harness import restart, run_on, wait_until
from tandem.errors import ConfigError, FailedPreconditionError
from tandem.run_directory.directory import RunDirectory
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.training.loop import train
from tandem.training.schedule import Schedule

STEPS = 7
# Unaligned with max_staleness 3: rollouts are saved with the checkpoint.
RUN: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every": 2}}


def ahead(staleness):
    return {"async": {"max_staleness": staleness}}


def digests(directory):
    """The digests of the weights after every step."""
    lines = harness.json_lines(directory / "run" / "versions.jsonl")
    return {line["step"]: line["digest"] for line in lines}


def responses(directory):
    """The bytes of the files of a run's trajectories and evaluations."""
    run = directory / "run"
    return {
        str(file.relative_to(run)): file.read_bytes()
        for pattern in ("trajectories/*.parquet", "evaluations/*.parquet", "evals.jsonl")
        for file in run.glob(pattern)
    }


@pytest.mark.parametrize("staleness", [1, 3])
def test_two_asynchronous_runs_are_the_same_bit_for_bit(fresh_pair, models, tmp_path, staleness):
    first = run_on(fresh_pair, models, tmp_path / "a", **RUN, **ahead(staleness))
    second = run_on(fresh_pair, models, tmp_path / "b", **RUN, **ahead(staleness))
    assert first == second
    assert responses(tmp_path / "a") == responses(tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(responses(tmp_path / "a")) == STEPS
    run_on(fresh_pair, models, tmp_path / "c", **RUN)
    assert digests(tmp_path / "a")[STEPS] != digests(tmp_path / "c")[STEPS]


def test_a_staleness_of_zero_is_the_run_in_step_bit_for_bit(fresh_pair, models, tmp_path):
    plain = run_on(fresh_pair, models, tmp_path / "plain", **RUN)
    assert run_on(fresh_pair, models, tmp_path / "zero", **RUN, **ahead(0)) == plain
    assert responses(tmp_path / "zero") == responses(tmp_path / "plain")
    assert digests(tmp_path / "zero") == digests(tmp_path / "plain")


def test_recorded_log_probs_are_those_of_the_weights_that_wrote_the_tokens(
    fresh_pair, models, tmp_path
):
    """By transformers in float64, with the checkpoint of the version that each token names."""
    staleness = 2
    changes = {"checkpoint": {"every": 1, "keep": 0}, "steps": 5}
    run_on(fresh_pair, models, tmp_path, **changes, **ahead(staleness))
    run, schedule = tmp_path / "run", Schedule(staleness)
    for step in range(2, 6):
        drawn_after = schedule.drawn_after(step)
        others = {step - 1} - {drawn_after}
        for record in harness.trajectories(run, step)[:4]:
            [[version, count, digest]] = record["senior_versions"]
            assert (version, count) == (drawn_after, len(record["response_token_ids"]))
            if drawn_after == 0:
                continue
            assert digest == digests(tmp_path)[drawn_after]
            mine = [i for i, author in enumerate(record["authorship_mask"]) if author == 1]
            recorded = np.array(record["senior_logprobs"])[mine]
            errors = {
                after: np.abs(_logprobs(run, models, after, record)[mine] - recorded).max()
                for after in {drawn_after} | others
            }
            assert errors[drawn_after] < 2e-5
            for other in others:
                # The weights that the step trains wrote none of its tokens.
                assert errors[other] > 1e-3


def _logprobs(run, models, step, record):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    if checkpoint not in _MODELS:
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(models.senior)).double()
        saved = harness.weights(checkpoint)  # moments of the optimizer among them
        saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
        model.load_state_dict({name: torch.from_numpy(saved[name]) for name in model.state_dict()})
        _MODELS[checkpoint] = model
    prompt, response = record["prompt_token_ids"], record["response_token_ids"]
    with torch.no_grad():
        logits = _MODELS[checkpoint](torch.tensor([[*prompt, *response]])).logits
    rows = torch.log_softmax(logits[0, len(prompt) - 1 : -1], -1)
    return rows[torch.arange(len(response)), torch.tensor(response)].numpy()


_MODELS: dict[Any, Any] = {}


# Call number DIE_AT kills the process; 12 responses a step.
DYING_REWARD = """
import itertools, os, signal
calls = itertools.count(1)
def reward(prompt, response, **row):
    if next(calls) == int(os.environ.get("DIE_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return (len(response) + 3 * response.count("e")) / 10
"""


LORA = {"rank": 4, "alpha": 8}


@pytest.mark.parametrize(
    ("staleness", "every", "adapted"),
    [(1, 1, {}), (3, 2, {}), (3, 2, {"lora": LORA})],
    ids=["1", "3", "3-lora"],
)
def test_a_run_that_is_killed_anywhere_resumes_to_the_same_bits(
    models, tmp_path, staleness, every, adapted
):
    with harness.cluster(
        tmp_path / "cluster", models, rollout={"senior": adapted}, trainer=adapted
    ) as running:
        _kill_and_resume(running, models, tmp_path, staleness, every)
        saved = tmp_path / "whole" / "run" / "checkpoints" / f"step_{STEPS:06d}"
        assert (saved / "adapter_model.safetensors").exists() == bool(adapted)


def _kill_and_resume(running, models, tmp_path, staleness, every):
    judge = tmp_path / "judge.py"
    judge.write_text(DYING_REWARD)
    changes = {
        "steps": STEPS,
        "checkpoint": {"every": every},
        "reward": {"function": f"{judge}:reward", "workers": 1},
        **ahead(staleness),
    }
    whole = run_on(running, models, tmp_path / "whole", **changes)
    for die_at in (30, 50, 61, 80):
        directory = tmp_path / str(die_at)
        config = harness.run_settings(directory, models, running, **changes)
        file = directory / "run.yaml"
        file.write_text(loading.dump(config))
        killed = subprocess.run(
            [sys.executable, "-m", "tandem", "train", file, "--discard-unsaved"],
            env=os.environ | {"DIE_AT": str(die_at)},
            capture_output=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        # The servers hold weights of the killed run, and of none of its checkpoints.
        resumed = subprocess.run(
            [sys.executable, "-m", "tandem", "train", file, "--resume=auto", "--discard-unsaved"],
            capture_output=True,
        )
        assert resumed.returncode == 0, resumed.stderr
        assert harness.metrics_without_clock(directory / "run") == whole
        assert responses(directory) == responses(tmp_path / "whole")
        assert digests(directory) == digests(tmp_path / "whole")


def restart_in_call(session, server, number):
    """Restarts a rollout server when it was admitted for a request of this number."""
    pool, generated = session.rollouts, session.rollouts.generate
    calls = itertools.count(1)
    # A call may be admitted at several servers, each in a thread of its own: all wait for the one
    # restart.
    lock, restarted = threading.Lock(), threading.Event()

    def generate(prompts, *, admit, **rest):
        call = next(calls)

        def admit_and_restart(client):
            admit(client)
            with lock:
                if call == number and not restarted.is_set():
                    restart(server)
                    restarted.set()

        return generated(prompts, admit=admit_and_restart, **rest)

    pool.generate = generate


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_rollout_server_that_loses_the_weights_of_a_step_ends_the_run_which_resumes(
    fresh_pair, models, tmp_path, staleness
):
    """The trainer has newer weights by then, and nobody can draw the step as it must be drawn."""
    changes = RUN | ahead(staleness)
    whole = run_on(fresh_pair, models, tmp_path / "whole", **changes)
    config = harness.run_settings(tmp_path / "run", models, fresh_pair, **changes)
    with RunDirectory.open(config, "train") as run, open_session(config) as session:
        restart_in_call(session, fresh_pair.rollouts[0], 6)
        with pytest.raises(FailedPreconditionError, match="the trainer has left behind") as caught:
            train(session, run, lambda line: None)
    assert caught.value.reason == "WEIGHTS_DIFFER"
    # The checkpoint of step 4 waits for the steps until 7 where max_staleness is 3.
    last = harness.json_lines(tmp_path / "run" / "run" / "metrics.jsonl")[-1]["step"]
    assert last == {1: 5, 3: 4}[staleness]
    resumed = run_on(fresh_pair, models, tmp_path / "run", resume=True, **changes)
    assert resumed == whole
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_a_server_that_restarts_between_two_steps(fresh_pair, models, tmp_path, role):
    """A rollout server gets weights with the next publication; a trainer ends the run."""
    changes = RUN | ahead(3)
    whole = run_on(fresh_pair, models, tmp_path / "whole", **changes)

    def on_step(line):
        if line["step"] == 5:
            if role == "trainer":
                # The run goes on from the checkpoint of this step.
                wait_until((tmp_path / "r" / "run" / "state.json").exists)
            # All that is drawn with the weights after step 3 is drawn.
            restart(fresh_pair.trainer if role == "trainer" else fresh_pair.rollouts[0])

    changes["checkpoint"] = {"every": 5}
    if role == "rollout":
        assert run_on(fresh_pair, models, tmp_path / "r", on_step=on_step, **changes) == whole
        return
    with pytest.raises(FailedPreconditionError) as caught:
        run_on(fresh_pair, models, tmp_path / "r", on_step=on_step, **changes)
    assert caught.value.reason == "STALE_POLICY_VERSION"
    assert run_on(fresh_pair, models, tmp_path / "r", resume=True, **changes) == whole


def test_a_lost_server_leaves_its_prompts_to_the_others_and_changes_nothing(models, tmp_path):
    """The one that comes back without weights draws nothing before it got the next ones."""
    changes = RUN | ahead(3) | {"batch": {"prompts_per_step": 9, "samples_per_prompt": 2}}
    with harness.cluster(tmp_path / "one", models, trainer={}) as running:
        whole = run_on(running, models, tmp_path / "whole", **changes)
    rollout = {"max_num_seqs": 2}
    with harness.cluster(
        tmp_path / "two", models, rollouts=2, rollout=rollout, trainer={}
    ) as running:
        config = harness.run_settings(tmp_path / "run", models, running, **changes)
        with RunDirectory.open(config, "train") as run, open_session(config) as session:
            restart_in_call(session, running.rollouts[0], 6)
            train(session, run, lambda line: None)
            served = {client.weights_version().version for client in session.rollouts.clients}
    assert harness.metrics_without_clock(tmp_path / "run" / "run") == whole
    assert responses(tmp_path / "run") == responses(tmp_path / "whole")
    assert served == {6}


def test_ppo_with_evaluations_is_the_same_bit_for_bit_when_it_is_resumed(models, tmp_path):
    changes = {
        "steps": 6,
        "objective": {"advantage_estimator": "gae", "whiten_advantages": True},
        "eval": {"every": 2, "modes": ["solo", "legibility"], "max_tokens": 8},
        **ahead(2),
    }
    with harness.cluster(tmp_path / "cluster", models, trainer={}, critic={}) as running:
        whole = run_on(running, models, tmp_path / "whole", **changes)

        def on_step(line):
            if line["step"] == 5:
                raise ConfigError("no more")

        with pytest.raises(ConfigError) as caught:
            run_on(running, models, tmp_path / "run", on_step=on_step, **changes)
        assert "saved after step 5" in caught.value.__notes__[0]
        assert run_on(running, models, tmp_path / "run", resume=True, **changes) == whole
    assert whole[-1]["critic/updates"] > 0
    for line in harness.json_lines(tmp_path / "whole" / "run" / "metrics.jsonl"):
        assert 0 < line["time/critic_seconds"] < line["time/train_seconds"]
        assert 0 < line["idle/critic"] < 1
    assert responses(tmp_path / "run") == responses(tmp_path / "whole")
    lines = harness.json_lines(tmp_path / "run" / "run" / "evals.jsonl")
    evaluated = [(line["step"], line["version/senior"]) for line in lines]
    assert evaluated == [(step, step) for step in (0, 2, 4, 6) for _ in range(2)]


def test_a_speculator_is_published_with_its_senior_and_changes_no_response(models, tmp_path):
    heads = drafts.write_speculator(tmp_path / "heads", models.senior, {})
    optimizer = {"learning_rate": 0.02}
    trainer = {"speculator": {"adapter": "mlp", "path": str(heads), "optimizer": optimizer}}
    rollout = {"senior_speculator": str(heads)}
    with harness.cluster(tmp_path / "c", models, rollout=rollout, trainer=trainer) as running:
        whole = run_on(running, models, tmp_path / "whole", **RUN, **ahead(2))
        changes = {"speculative": {"method": "heads"}}
        drafted = run_on(running, models, tmp_path / "drafted", **RUN, **ahead(2), **changes)
        with harness.rollout_client(running) as client:
            assert client.info().speculator_weights.version == 6
    assert drafted == whole
    assert digests(tmp_path / "drafted") == digests(tmp_path / "whole")


def test_dynamic_sampling_draws_the_prompts_in_the_order_of_the_data(fresh_pair, models, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def reward(prompt, response, **row):\n    return len(prompt) % 2 * len(response) / 10\n"
    )
    changes = {
        "steps": 5,
        "reward": {"function": f"{judge}:reward"},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 4, "filter_groups": {}},
        "checkpoint": {"every": 3},
        **ahead(2),
    }
    whole = run_on(fresh_pair, models, tmp_path / "whole", **changes)
    assert any(line["batch/num_gen_batches"] > 1 for line in whole)
    run_on(fresh_pair, models, tmp_path / "other", **(changes | ahead(1)))
    # The rewards of the steps before a step decide its rows.
    places = [
        [record["place"] for step in range(1, 6) for record in harness.trajectories(run, step)]
        for run in (tmp_path / "whole" / "run", tmp_path / "other" / "run")
    ]
    assert places[0][:8] == places[1][:8]

    def on_step(line):
        if line["step"] == 4:
            raise ConfigError("no more")

    with pytest.raises(ConfigError):
        run_on(fresh_pair, models, tmp_path / "run", on_step=on_step, **changes)
    assert run_on(fresh_pair, models, tmp_path / "run", resume=True, **changes) == whole
