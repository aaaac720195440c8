"""A pool of rollout servers answers as one server does, whatever happens to some of them."""

import dataclasses
import random
import threading

import fakes
import grpc
import pytest
from fake_fleet import FakeReplica, meet, pool_of, random_delay

from tandem.errors import ConfigError, DeadlineError, InvalidArgumentError, UnavailableError
from tandem.rpc.requests import Prompt, ResponseSoFar
from tandem.rpc.retry import RetryPolicy

SAMPLING = {"max_tokens": 5}


@pytest.fixture
def replicas(world):
    """Three replicas."""
    return [FakeReplica(world) for _ in range(3)]


def prompts_of(count, num_samples=2):
    return [
        Prompt([1 + i % 4, 2, i], seed=i, num_samples=num_samples, sampling=SAMPLING)
        for i in range(count)
    ]


def undisturbed(prompts, version=0):
    """The answers of one server alone."""
    return [
        [fakes.sample(prompt.message(), i, version) for i in range(prompt.num_samples)]
        for prompt in prompts
    ]


def bring_up(replicas, version):
    """An admit() that gives a replica the weights that it lacks, as a session does."""

    def admit(client):
        if client.weights_version().version != version:
            [replica] = [one for one in replicas if one.address == client.address]
            replica.version = version

    return admit


def test_delays_losses_and_lags_change_nothing(world, subtests):
    for seed in range(25):
        with subtests.test(seed=seed):
            generator = random.Random(seed)
            replicas = [FakeReplica(world) for _ in range(generator.randint(1, 4))]
            for i, replica in enumerate(replicas):
                replica.delay = random_delay(seed + i, generator.choice((0.0, 0.0005, 0.003)))
                replica.version = generator.choice((0, 3))
                # The last one is never lost: a request without any replica fails.
                if replica is not replicas[-1]:
                    replica.losses = sorted(generator.choices(range(30), k=generator.randint(0, 2)))
                    replica.down_seconds = None if generator.random() < 0.3 else 0.03
            prompts = prompts_of(generator.randint(0, 24), generator.randint(1, 4))
            with pool_of(replicas, capacity=generator.randint(1, 4)) as pool:
                for _ in range(2):
                    drawn = pool.generate(prompts, bring_up(replicas, version=3))
                    assert drawn == undisturbed(prompts, version=3)


def test_one_two_and_three_replicas_draw_the_same(world):
    prompts = prompts_of(9)
    answers = []
    for count in (1, 2, 3):
        replicas = [FakeReplica(world) for _ in range(count)]
        meet(replicas)
        with pool_of(replicas) as pool:
            answers.append(pool.generate(prompts))
            assert pool.take_counts().replicas == {client.address for client in pool.clients}
    assert answers == [undisturbed(prompts)] * 3


def test_prompts_that_begin_alike_meet_on_one_replica(replicas):
    # Rows of three kinds, mixed.
    prompts = [
        Prompt([kind] * 8 + [row], seed=row, sampling=SAMPLING)
        for row in range(4)
        for kind in (7, 5, 6)
    ]
    held = threading.Event()
    for replica in replicas:
        replica.delay = lambda: held.wait(60)
    with pool_of(replicas, capacity=4) as pool:
        work = threading.Thread(target=pool.generate, args=(prompts,))
        work.start()
        fakes.wait_until(lambda: all(replica.streams for replica in replicas))
        held.set()
        work.join()
    kinds = [
        {prompts[int(name.removeprefix("prompt-"))].token_ids[0] for name, _ in replica.drawn}
        for replica in replicas
    ]
    assert sorted(map(tuple, kinds)) == [(5,), (6,), (7,)]


def test_what_a_slow_replica_has_not_begun_goes_to_the_others(replicas):
    slow, others = replicas[0], replicas[1:]
    prompts = prompts_of(24, num_samples=1)
    meet(replicas)

    def others_are_done():
        # A prompt that is recalled too late is drawn twice; "~2" is the second time.
        drawn = {name.partition("~")[0] for replica in others for name, _ in replica.drawn}
        return len(drawn) == 22 and not any(replica.streams for replica in others)

    slow.delay = lambda: fakes.wait_until(lambda: len(slow.recalled) == 2 and others_are_done())
    for replica in others:
        replica.delay = lambda: fakes.wait_until(lambda: len(slow.submitted) == 4)
    with pool_of(replicas, capacity=2) as pool:
        assert pool.generate(prompts) == undisturbed(prompts)
        counts = pool.take_counts()
    # It has begun two: its capacity. Two more were sent to it, and recalled.
    assert len(slow.drawn) == 2
    assert len(slow.cancelled) == 2
    assert counts.moved >= 6
    assert counts.retried == 0


def test_the_prompts_of_a_lost_replica_are_asked_again_once(replicas, notes):
    lost, *others = replicas
    prompts = prompts_of(12)
    lost.losses, lost.down_seconds = [3], None
    # It gets the third prompt when the pool has the samples of the first one.
    lost.delay = lambda: fakes.wait_until(lambda: len(lost.drawn) < 3 or len(lost.submitted) == 3)
    for replica in others:
        replica.delay = lambda: fakes.wait_until(lambda: notes)
    with pool_of(replicas) as pool:
        assert pool.generate(prompts) == undisturbed(prompts)
        counts = pool.take_counts()
        # Its window had the second prompt, of which it had drawn one sample, and the third one.
        assert len(lost.drawn) == 3
        assert counts.retried == 2
        assert pool.generate(prompts) == undisturbed(prompts)
        assert len(pool.take_counts().replicas) == 2
        assert "2 of its prompts are retried" in notes[0]
        assert f"{lost.address}: is down" in notes[0]


def test_a_replica_that_is_back_is_used_again(replicas, notes):
    lost, *others = replicas
    lost.losses, lost.down_seconds = [0], None
    for replica in others:
        replica.delay = lambda: fakes.wait_until(lambda: lost.drawn)
    prompts = prompts_of(40)

    def note(text):
        if "it is left out until it answers again" in text:
            lost.come_back()

    notes.on_note = note
    with pool_of(replicas) as pool:
        assert pool.generate(prompts) == undisturbed(prompts)
    assert any("it is left out until it answers again" in note for note in notes)
    assert f"{lost.address} answers again" in notes


def test_a_pool_whose_replicas_are_all_lost_fails_with_the_last_error(replicas):
    for replica in replicas:
        replica.losses, replica.down_seconds = [1], None
    patience = RetryPolicy(seconds=0.2, initial_seconds=0.01)
    with pool_of(replicas, retry=patience) as pool, pytest.raises(UnavailableError, match="down"):
        pool.generate(prompts_of(12))
    fakes.wait_until(lambda: not any(replica.streams for replica in replicas))


@pytest.mark.parametrize("count", [1, 3])
def test_replicas_that_are_all_lost_for_a_while_do_not_end_the_request(world, count, notes):
    replicas, prompts = [FakeReplica(world) for _ in range(count)], prompts_of(12)
    for replica in replicas:
        replica.losses, replica.down_seconds = [1, 4], None

    def note(text):
        if all(replica.is_down for replica in replicas):
            for replica in replicas:
                replica.come_back()

    notes.on_note = note
    with pool_of(replicas) as pool:
        assert pool.generate(prompts) == undisturbed(prompts)
        assert pool.take_counts().retried > 0
    assert any("is down" in text for text in notes)
    assert any("answers again" in text for text in notes)


def test_a_call_that_every_prompt_has_left_ends_by_itself(world):
    replica = FakeReplica(world)
    with pool_of([replica]) as pool:
        for _ in range(5):
            pool.generate(prompts_of(3))
    assert len(replica.contexts) == 5
    assert (replica.streams, replica.cut) == (0, 0)


def test_a_replica_that_is_not_admitted_draws_nothing(replicas):
    prompts = prompts_of(12)

    def admit(client):
        if client.address == replicas[1].address:
            raise UnavailableError("lags behind", code=grpc.StatusCode.UNAVAILABLE)

    with pool_of(replicas) as pool:
        assert pool.generate(prompts, admit) == undisturbed(prompts)
    assert not replicas[1].drawn


def test_a_refused_prompt_ends_the_request_and_its_calls(replicas):
    go_on = threading.Event()
    for replica in replicas[1:]:
        replica.delay = lambda: go_on.wait(60)
    replicas[0].delay = lambda: fakes.wait_until(lambda: all(one.submitted for one in replicas))
    prompts = prompts_of(12)
    prompts[0] = Prompt([0], seed=0, sampling=SAMPLING | {"top_k": -1})
    with pool_of(replicas) as pool:
        with pytest.raises(InvalidArgumentError) as caught:
            pool.generate(prompts)
        assert not any(replica.drawn for replica in replicas[1:])
        contexts = [context for replica in replicas for context in replica.contexts]
        fakes.wait_until(lambda: not any(context.is_active() for context in contexts))
        go_on.set()
        fakes.wait_until(lambda: not any(replica.streams for replica in replicas))
    assert caught.value.field == "sampling.top_k"
    # Cancelled calls draw no more than the sample that they were at.
    assert all(len(replica.drawn) <= 1 for replica in replicas[1:])


def test_two_prompts_of_one_name_are_refused(replicas):
    prompts = [Prompt([1], seed=seed, request_id="a") for seed in range(2)]
    with pool_of(replicas) as pool, pytest.raises(ConfigError, match=r"prompts\[1\].request_id"):
        pool.generate(prompts)


def test_a_replica_is_drained_while_the_others_draw(replicas):
    prompts, answers = prompts_of(60), []
    # How many samples each may draw while it is not drained, so that some are always left.
    allowed, over = [1, 1, 1], threading.Event()
    with pool_of(replicas) as pool:
        for i, fake in enumerate(replicas):
            fake.delay = lambda i=i: fakes.wait_until(
                lambda: (
                    over.is_set() or pool.replicas[i].updates or len(replicas[i].drawn) < allowed[i]
                )
            )
        work = threading.Thread(target=lambda: answers.append(pool.generate(prompts)))
        work.start()
        for replica, fake in zip(pool.replicas, replicas, strict=True):
            fakes.wait_until(lambda fake=fake: fake.streams)
            with pool.drained(replica):
                assert fake.streams == 0
                before = [len(one.drawn) for one in replicas]
                others = [i for i, one in enumerate(replicas) if one is not fake]
                for i in others:
                    allowed[i] = before[i] + 1
                fakes.wait_until(
                    lambda before=before, others=others: all(
                        len(replicas[i].drawn) > before[i] for i in others
                    )
                )
                assert fake.streams == 0
                assert len(fake.drawn) == before[replicas.index(fake)]
        over.set()
        work.join()
    assert answers == [undisturbed(prompts)]


def test_a_replica_that_does_not_end_its_calls_is_not_waited_for_for_ever(replicas):
    go_on = threading.Event()
    meet(replicas)
    replicas[0].delay = lambda: go_on.wait(60)
    prompts, answers = prompts_of(12), []
    with pool_of(replicas) as pool:
        work = threading.Thread(target=lambda: answers.append(pool.generate(prompts)))
        work.start()
        fakes.wait_until(lambda: replicas[0].streams)
        seconds, pool.clients[0].timeout_seconds = pool.clients[0].timeout_seconds, 0.1
        with pytest.raises(DeadlineError), pool.drained(pool.replicas[0]):
            pass
        pool.clients[0].timeout_seconds = seconds
        go_on.set()
        work.join()
    assert answers == [undisturbed(prompts)]


@pytest.mark.parametrize("lost", [False, True])
def test_scores_are_in_order_whoever_computes_them(replicas, monkeypatch, lost):
    monkeypatch.setattr("tandem.pool.scoring.SCORE_TOKENS", 8)
    replicas[0].world.logprob["senior"] = lambda token: -token
    slow, used = replicas[1], replicas[:2] if lost else replicas
    called = set()

    def wait_for_the_others(replica):
        called.add(replica)
        fakes.wait_until(lambda: len(called) == len(used))
        if replica is slow:
            fakes.wait_until(lambda: sum(one.scored for one in used) == 38)

    for replica in used:
        replica.delay = lambda replica=replica: wait_for_the_others(replica)
    if lost:
        replicas[2].down_seconds = None
    sequences = [([1, 2, 3, token], 3) for token in range(40)]
    with pool_of(replicas) as pool:
        if lost:
            replicas[2].lose()
        scored = pool.score(sequences, senior=True)
    assert [one.senior.tolist() for one in scored] == [[-token] for token in range(40)]
    assert bool(replicas[2].scored) != lost
    # The slow one computes its first call's, no more.
    assert slow.scored == 2


def test_continued_samples_are_drawn_as_by_one_server(replicas):
    prompts = [
        dataclasses.replace(
            prompt,
            num_samples=1,
            first_sample_index=place % 3,
            response=ResponseSoFar([4, 5], [2, 2]),
        )
        for place, prompt in enumerate(prompts_of(9))
    ]
    with pool_of(replicas) as pool:
        answers = pool.generate(prompts)
    assert answers == [
        [fakes.sample(prompt.message(), prompt.first_sample_index, 0)] for prompt in prompts
    ]
