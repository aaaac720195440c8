"""Several real rollout servers, of which some are slow, lost, restarted or updated."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import Any

import harness
import pytest
from harness import metrics_without_clock, restart, wait_until
from tandem.pool.replicas import Replica
from tandem.pool.rollout_pool import RolloutPool, response_to_score
from tandem.rpc.requests import PolicySample, Prompt
from tandem.session.opening import open_session
from tandem.session.session import WeightsRule

# Fewer sequences at a time than a server's share has, so that prompts wait.
ROLLOUT = {"max_num_seqs": 4}
RUN: dict[str, Any] = {
    "batch": {"prompts_per_step": 9, "samples_per_prompt": 2},
    "return_other_logprobs": True,
}


@pytest.fixture
def rollouts(models, tmp_path):
    """Three rollout servers."""
    with harness.cluster(tmp_path / "cluster", models, rollouts=3, rollout=ROLLOUT) as running:
        yield running


@pytest.fixture
def with_trainer(models, tmp_path):
    """Three rollout servers and a trainer."""
    with harness.cluster(
        tmp_path / "cluster", models, rollouts=3, rollout=ROLLOUT, trainer={}
    ) as running:
        yield running


@contextmanager
def pool_of(running, count=3):
    clients = [harness.rollout_client(running, index) for index in range(count)]
    pool = RolloutPool([Replica.of(client, client.info()) for client in clients])
    try:
        yield pool
    finally:
        pool.close()


def prompts_of(count, max_tokens=48):
    return [
        Prompt(
            [2 + i % 3, 5, 6 + i % 250],
            seed=i,
            num_samples=2,
            sampling={"max_tokens": max_tokens, "ignore_eos": True},
            tandem=harness.TANDEM["word"],
            return_other_logprobs=True,
        )
        for i in range(count)
    ]


def draw_in_thread(draw):
    """Starts `draw` in a thread; returns the thread and the list that gets its answers."""
    answers = []
    work = threading.Thread(target=lambda: answers.extend(draw()))
    work.start()
    return work, answers


def running_on(server):
    return harness.gauge(server, "tandem_sequences_running")


def waiting_on(server):
    return harness.gauge(server, "tandem_sequences_waiting")


def tokens_of(server):
    """The tokens that a server has read so far."""
    return harness.gauge(server, "tandem_prompt_tokens_total")


def test_answers_do_not_depend_on_the_number_of_servers(rollouts):
    prompts = prompts_of(20)
    with pool_of(rollouts, 1) as alone, pool_of(rollouts, 2) as two, pool_of(rollouts) as three:
        drawn = alone.generate(prompts)
        assert two.generate(prompts) == drawn
        assert three.generate(prompts) == drawn
        assert len(three.take_counts().replicas) <= 3
        asked = [response_to_score(one) for one in harness.flat(drawn)]
        scored = [pool.score(asked, senior=True) for pool in (alone, three)]
    for one, other in zip(*scored, strict=True):
        assert one.senior.tobytes() == other.senior.tobytes()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_the_prompts_of_a_server_that_ends_are_drawn_by_the_others(rollouts, ending):
    """With SIGTERM it drains: it takes no further prompt."""
    prompts, ended = prompts_of(300), rollouts.rollouts[1]
    with pool_of(rollouts) as pool:
        whole = pool.generate(prompts)
        pool.take_counts()
        # Paused, it has prompts and answers none, until the others take them.
        pool.clients[1].pause()
        work, answers = draw_in_thread(lambda: pool.generate(prompts))
        wait_until(lambda: waiting_on(ended) > 0 or not work.is_alive(), pause=0.001)
        if ending == signal.SIGTERM:
            pool.clients[1].resume()
        ended.process.send_signal(ending)
        work.join()
        assert answers == whole
        pool.take_counts()
        assert ended.process.wait(30) == (-ending if ending == signal.SIGKILL else 0)
        assert pool.generate(prompts) == whole
        assert len(pool.take_counts().replicas) <= 2


def test_a_server_that_stands_still_keeps_only_what_it_has_begun(rollouts):
    prompts = prompts_of(40)
    with pool_of(rollouts) as pool:
        whole = pool.generate(prompts)
        pool.take_counts()
        others = rollouts.rollouts[1:]
        before = sum(map(tokens_of, others))
        pool.clients[0].pause()
        work, answers = draw_in_thread(lambda: pool.generate(prompts))
        wait_until(lambda: sum(map(tokens_of, others)) > before)
        wait_until(lambda: not any(map(running_on, others)))
        pool.clients[0].resume()
        work.join()
        counts = pool.take_counts()
    assert answers == whole
    assert counts.retried == 0


def test_servers_are_drained_in_turn_while_the_others_draw(rollouts):
    def passes(server):
        return harness.gauge(server, "tandem_forward_passes_total")

    prompts = prompts_of(400)
    with pool_of(rollouts) as pool:
        whole = pool.generate(prompts)
        work, answers = draw_in_thread(lambda: pool.generate(prompts))
        for replica, server in zip(pool.replicas, rollouts.rollouts, strict=True):
            others = [one for one in rollouts.rollouts if one is not server]
            wait_until(lambda one=server: running_on(one) > 0 or not work.is_alive(), pause=0.001)
            with pool.drained(replica):
                # A gauge is written at the end of a step, after the step's events were sent.
                wait_until(lambda server=server: running_on(server) == 0, pause=0.001)
                before = {one.name: passes(one) for one in rollouts.rollouts}
                for other in others:
                    wait_until(
                        lambda one=other, then=before: (
                            passes(one) > then[one.name] or not work.is_alive()
                        )
                    )
                assert passes(server) == before[server.name]
        work.join()
    assert answers == whole


def run_on(running, models, directory, count=3, steps=3, **options):
    """The metrics and trajectories of a run on the first `count` rollout servers, and its path."""
    config = harness.run_settings(directory, models, running, steps=steps, **RUN)
    config.servers.rollout = config.servers.rollout[:count]
    run = harness.run_training(config, **options)
    files = sorted((run / "trajectories").iterdir())
    return metrics_without_clock(run), [file.read_bytes() for file in files], run


def replicas_of(run):
    return [line["rollout/replicas"] for line in harness.json_lines(run / "metrics.jsonl")]


def test_a_run_is_the_same_on_one_two_and_three_servers(with_trainer, models, tmp_path):
    runs = [run_on(with_trainer, models, tmp_path / str(count), count) for count in (1, 2, 3)]
    assert runs[1][:2] == runs[0][:2]
    assert runs[2][:2] == runs[0][:2]
    for count, (_, _, run) in enumerate(runs, start=1):
        assert max(replicas_of(run)) <= count


def test_a_run_that_loses_a_server_is_the_same(with_trainer, models, tmp_path):
    whole = run_on(with_trainer, models, tmp_path / "whole", steps=8)
    lost = with_trainer.rollouts[1]

    def on_step(line):
        if line["step"] == 1:
            lost.process.kill()

    disturbed = run_on(with_trainer, models, tmp_path / "disturbed", steps=8, on_step=on_step)
    assert disturbed[:2] == whole[:2]
    assert max(replicas_of(disturbed[2])[1:]) <= 2


def test_a_server_that_restarts_between_steps_is_brought_up_to_date(with_trainer, models, tmp_path):
    whole = run_on(with_trainer, models, tmp_path / "whole")

    def on_step(line):
        if line["step"] == 2:
            restart(with_trainer.rollouts[2])

    disturbed = run_on(with_trainer, models, tmp_path / "disturbed", on_step=on_step)
    assert disturbed[:2] == whole[:2]


def test_servers_are_updated_in_turn_while_the_others_draw(with_trainer, models, tmp_path):
    prompts = prompts_of(150, max_tokens=100)
    config = harness.run_settings(
        tmp_path, models, with_trainer, **RUN, objective={"max_staleness": 1}
    )
    with open_session(config) as session:
        begin = session.weights()
        groups = session.generate(prompts[:3])
        samples = [
            PolicySample(one, f"group-{g}", reward=float(i))
            for g, group in enumerate(groups)
            for i, one in enumerate(group)
        ]
        work, answers = draw_in_thread(
            lambda: session.generate(prompts, begin, rule=WeightsRule.ANY_SINCE)
        )
        session.trainer.train_step(samples, run_id="mine", step=1, expected_version=begin.version)
        session.publish()
        work.join()
        served = {client.weights_version().version for client in session.rollouts.clients}
    assert served == {begin.version + 1}
    written = [
        {run.weights.version for run in one.senior_versions} for one in harness.flat(answers)
    ]
    # A server ends its samples before it takes the weights, so no sample has two versions.
    assert {len(versions) for versions in written} == {1}
    assert set().union(*written) <= {begin.version, begin.version + 1}
