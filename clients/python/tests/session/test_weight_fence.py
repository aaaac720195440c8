"""Weights that a run lets its rollout servers use, and their way there."""

import threading

import fake_fleet
import fakes
import pytest
from fake_fleet import FakeReplica
from grpc_status import rpc_status

from tandem.errors import ConfigError, FailedPreconditionError
from tandem.rpc.requests import Prompt
from tandem.session.opening import open_session
from tandem.session.session import WeightsRule
from tandem.settings import loading
from tandem.settings.run import RunSettings

STALE = "objective.max_staleness=2"


class BreakingReplica(FakeReplica):
    """A replica whose Generate call breaks off once, at its first sample, with its weights kept.

    Attributes:
        on_break: called before.
    """

    def __init__(self, world, on_break):
        super().__init__(world)
        self.on_break = on_break
        self._breaks = True

    def _sample(self, prompt, index, context):
        if self._breaks:
            self._breaks = False
            self.on_break()
            context.abort_with_status(rpc_status.to_status(fakes.error_status(14, "breaks off")))
        return super()._sample(prompt, index, context)


@pytest.fixture
def session_on(run_file):
    """Opens a session on served replicas."""

    def session_on(trainer, replicas, *overrides):
        addresses = ", ".join(one.address for one in replicas)
        servers = [f"servers.trainer={trainer}", f"servers.rollout=[{addresses}]"]
        return open_session(loading.load(RunSettings, run_file, [*servers, *overrides]))

    return session_on


@pytest.fixture
def replicas(world):
    """Two replicas that draw two samples at a time."""
    world.max_num_seqs = 2
    return [FakeReplica(world) for _ in range(2)]


def prompts_of(count):
    return [Prompt([i], seed=i, num_samples=2, sampling={"max_tokens": 4}) for i in range(count)]


def versions_in(answers):
    return {
        run.weights.version for group in answers for one in group for run in one.senior_versions
    }


def test_a_server_may_draw_between_two_updates_of_a_request(world, session_on):
    def update_twice():
        # Both servers got version 1, and the trainer already has version 2.
        for replica in replicas:
            replica.version = 1
        world.version = 2

    world.max_num_seqs = 2
    replicas = [BreakingReplica(world, update_twice), FakeReplica(world)]
    replicas[1].delay = lambda: fakes.wait_until(lambda: replicas[0].drawn)
    prompts = prompts_of(20)
    with fake_fleet.serve(replicas) as trainer, session_on(trainer, replicas, STALE) as session:
        answers = session.generate(prompts, rule=WeightsRule.ANY_SINCE)
    assert len(answers) == len(prompts)
    assert 1 in versions_in(answers) <= {0, 1}
    assert world.publications == []


@pytest.mark.parametrize("rule", [WeightsRule.CURRENT, WeightsRule.ANY_SINCE])
def test_a_server_ahead_of_the_trainer_is_refused(world, replicas, session_on, rule):
    with fake_fleet.serve(replicas) as trainer, session_on(trainer, replicas, STALE) as session:
        weights = session.weights()
        world.version, replicas[0].version = 2, 3
        with pytest.raises(FailedPreconditionError) as caught:
            session.bring_up(weights, session.rollouts.clients[0], rule=rule)
    assert caught.value.reason == "WEIGHTS_DIFFER"
    held = 2 if rule is WeightsRule.ANY_SINCE else 0
    assert f"{replicas[0].address} serves version 3 with digest d" in str(caught.value)
    assert f"the trainer holds version {held} with d" in str(caught.value)


def test_two_servers_that_advertise_one_address_are_refused(world, replicas, session_on):
    first, second = replicas
    with fake_fleet.serve(replicas) as trainer:
        dialled = [first.address, second.address]
        later = session_on(trainer, replicas)
        with session_on(trainer, replicas) as session:
            second.address = first.address
            with pytest.raises(ConfigError) as caught:
                session.publish()
        with pytest.raises(ConfigError) as at_start, later:
            pass
    for said in (str(caught.value), str(at_start.value)):
        assert f"the rollout servers at {dialled[0]} and {dialled[1]} advertise" in said
        assert f"the same address, {first.address}" in said
    assert world.publications == []


def test_a_single_server_gets_weights_while_it_draws(world, session_on):
    world.max_num_seqs = 2
    replica = FakeReplica(world)
    go_on = threading.Event()
    replica.delay = lambda: go_on.wait(60)
    answers = []
    with fake_fleet.serve([replica]) as trainer, session_on(trainer, [replica], STALE) as session:
        work = threading.Thread(
            target=lambda: answers.extend(
                session.generate(prompts_of(4), rule=WeightsRule.ANY_SINCE)
            )
        )
        work.start()
        try:
            fakes.wait_until(lambda: replica.streams)
            world.version = 1
            published = threading.Thread(target=session.publish)
            published.start()
            published.join(10)
            assert not published.is_alive()
            assert replica.updates == [1]
        finally:
            go_on.set()
            work.join()
            published.join()
    assert len(answers) == 4


def test_what_another_publication_brings_is_not_sent_again(world, replicas, session_on):
    with fake_fleet.serve(replicas) as trainer, session_on(trainer, replicas) as session:
        world.version = 1
        weights = session.weights()
        entered, go_on, asked = threading.Event(), threading.Event(), []
        publish_weights = session.trainer.publish_weights

        def publish(*targets, **options):
            entered.set()
            go_on.wait(60)
            return publish_weights(*targets, **options)

        def bring_up(client):
            weights_version = client.weights_version

            def ask():
                served = weights_version()
                asked.append(served.version)
                return served

            client.weights_version = ask
            session.bring_up(weights, client)

        session.trainer.publish_weights = publish
        threads = [threading.Thread(target=session.publish)]
        threads[0].start()
        assert entered.wait(60)
        for client in session.rollouts.clients:
            threads.append(threading.Thread(target=bring_up, args=(client,)))
            threads[-1].start()
        fakes.wait_until(lambda: len(asked) == 2)
        go_on.set()
        for thread in threads:
            thread.join()
    # Each server was behind when it was asked first, and served the weights when it was its turn.
    assert asked == [0, 0, 1, 1]
    assert world.targets_of_publications == [[one.address for one in replicas]]
