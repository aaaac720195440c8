"""Runs on several real rollout servers, of which some are slow, lost, restarted or updated."""

from __future__ import annotations

import threading
from typing import Any

import harness
import pytest
from harness import metrics_without_clock, wait_until
from tandem.requests import PolicySample, Prompt
from tandem.session import Session
from test_runs import restart

# Fewer sequences at a time than a replica's share has, so that prompts wait.
ROLLOUT = {"max_num_seqs": 4}
RUNNING = "tandem_sequences_running"
SIZES: dict[str, Any] = {
    "batch": {"prompts_per_step": 9, "samples_per_prompt": 2},
    "return_other_logprobs": True,
}


@pytest.fixture
def three(models, tmp_path):
    """Three rollout servers and a trainer."""
    with harness.cluster(
        tmp_path / "cluster", models, rollouts=3, rollout=ROLLOUT, trainer={}
    ) as running:
        yield running


def run_on(running, models, directory, count=3, **options):
    """The metrics and trajectories of a run on the first `count` rollout servers."""
    config = harness.run_settings(directory, models, running, **SIZES)
    config.servers.rollout = config.servers.rollout[:count]
    run = harness.run_training(config, **options)
    files = sorted((run / "trajectories").iterdir())
    return metrics_without_clock(run), [file.read_text() for file in files], run


def counted(run, key):
    return [line[key] for line in harness.json_lines(run / "metrics.jsonl")]


def session_on(running, models, directory, **changes):
    return Session(harness.run_settings(directory, models, running, **SIZES, **changes))


def many_prompts(count, max_tokens=48):
    return [
        Prompt(
            [2 + i % 3, 5, 6 + i],
            seed=i,
            num_samples=2,
            sampling={"max_tokens": max_tokens, "ignore_eos": True},
            tandem=harness.TANDEM["word"],
            return_other_logprobs=True,
        )
        for i in range(count)
    ]


def test_a_run_is_the_same_on_one_two_and_three_servers(three, models, tmp_path):
    runs = [run_on(three, models, tmp_path / str(count), count) for count in (1, 2, 3)]
    assert runs[1][:2] == runs[0][:2]
    assert runs[2][:2] == runs[0][:2]
    assert counted(runs[2][2], "rollout/replicas") == [3, 3, 3]


def test_a_run_that_loses_a_server_in_a_step_is_the_same(three, models, tmp_path):
    whole = run_on(three, models, tmp_path / "whole")
    lost = three.rollouts[1]

    def kill_while_it_draws():
        wait_until(lambda: harness.gauge(lost, RUNNING) > 0, pause=0.001)
        lost.process.kill()

    killer = threading.Thread(target=kill_while_it_draws)
    disturbed = run_on(
        three,
        models,
        tmp_path / "disturbed",
        on_step=lambda line: killer.start() if line["step"] == 1 else None,
    )
    killer.join()
    assert disturbed[:2] == whole[:2]
    assert counted(disturbed[2], "rollout/replicas")[-1] == 2


def test_a_server_that_restarts_between_steps_is_brought_up_to_date(three, models, tmp_path):
    whole = run_on(three, models, tmp_path / "whole")

    def on_step(line):
        if line["step"] == 2:
            restart(three.rollouts[2])

    disturbed = run_on(three, models, tmp_path / "disturbed", on_step=on_step)
    assert disturbed[:2] == whole[:2]
    assert counted(disturbed[2], "rollout/replicas") == [3, 3, 3]


def test_a_server_that_stands_still_keeps_only_what_it_has_begun(three, models, tmp_path):
    prompts = many_prompts(30)
    with session_on(three, models, tmp_path) as session:
        whole = session.generate(prompts)
        session.rollouts.take_counts()
        slow = session.rollouts.clients[0]
        slow.pause()
        answers = []
        work = threading.Thread(target=lambda: answers.extend(session.generate(prompts)))
        work.start()
        others = three.rollouts[1:]
        wait_until(lambda: all(harness.gauge(one, RUNNING) for one in others))
        wait_until(lambda: not any(harness.gauge(one, RUNNING) for one in others))
        # What is left is on the server that stands still, which has begun none of it.
        assert work.is_alive()
        slow.resume()
        work.join()
        counts = session.rollouts.take_counts()
    assert answers == whole
    assert counts.moved > 0
    assert counts.retried == 0


def test_servers_are_updated_in_turn_while_the_others_draw(three, models, tmp_path):
    prompts = many_prompts(90, max_tokens=100)
    stale = {"objective": {"max_staleness": 1}}
    with session_on(three, models, tmp_path, **stale) as session:
        begin = session.weights()
        groups = session.generate(prompts[:3])
        samples = [
            PolicySample(one, f"group-{g}", reward=float(i))
            for g, group in enumerate(groups)
            for i, one in enumerate(group)
        ]
        answers = []
        work = threading.Thread(
            target=lambda: answers.extend(session.generate(prompts, begin, any_version=True))
        )
        work.start()
        wait_until(lambda: all(harness.gauge(one, RUNNING) for one in three.rollouts))
        session.trainer.train_step(
            samples, run_id="mine", step=1, expected_version=begin.version, objective={}
        )
        session.publish()
        assert work.is_alive()
        work.join()
        assert {one.weights_version().version for one in session.rollouts.clients} == {1}
    written = [
        {run.weights.version for run in one.senior_versions} for one in harness.flat(answers)
    ]
    # A server ended its samples before it took the weights, so no sample has two versions.
    assert {len(versions) for versions in written} == {1}
    assert set().union(*written) == {0, 1}
    assert answers[:3] == groups
