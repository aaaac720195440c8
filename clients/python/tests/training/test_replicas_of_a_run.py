"""Runs on several rollout servers: they are what they are on one, and use no server that lags."""

import json
import threading

import fake_fleet
import fakes
import grpc
import pytest
from commands import records
from fake_fleet import FakeReplica, meet, random_delay

from tandem.errors import UnavailableError
from tandem.evaluation import evaluate
from tandem.metrics import CLOCK_KEYS
from tandem.rpc.requests import Prompt
from tandem.run_directory.directory import RunDirectory
from tandem.session.opening import open_session
from tandem.session.session import WeightsRule
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.training.loop import train

STEPS = 3


@pytest.fixture
def load(run_file, tmp_path):
    """Settings of a run on served replicas."""

    def load(trainer, replicas, *overrides):
        servers = [f"servers.trainer={trainer}"]
        servers.append(f"servers.rollout=[{', '.join(one.address for one in replicas)}]")
        return loading.load(RunSettings, run_file, [*servers, *overrides])

    return load


@pytest.fixture
def three(world):
    """Three replicas with delays of their own."""
    world.max_num_seqs = 2
    replicas = [FakeReplica(world) for _ in range(3)]
    for seed, replica in enumerate(replicas):
        replica.delay = random_delay(seed, 0.004)
    return replicas


def run_results(config, *, on_step=lambda line: None):
    """The metrics of a run that do not depend on the clock, and its trajectories."""
    with RunDirectory.open(config, "train") as run, open_session(config) as session:
        train(session, run, on_step)
    path = run.path
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    trajectories = [records(path, step) for step in range(1, STEPS + 1)]
    kept = [{key: value for key, value in line.items() if key not in CLOCK_KEYS} for line in lines]
    return kept, trajectories, lines


def wait_for_loss(others, notes):
    """Lets the others draw once the loss is noted and, in every step, each of them has prompts."""
    meet(others)
    for replica in others:
        before = replica.delay
        replica.delay = lambda before=before: (
            fakes.wait_until(lambda: any("are retried" in note for note in notes)),
            before(),
        )


def forget_prompts(replicas):
    """Begins a step for meet()."""
    for replica in replicas:
        replica.submitted.clear()


def run_on(replicas, load, tmp_path, name, prompts=6, seconds=120, **options):
    replicas[0].world.version = 0
    sizes = [f"batch.prompts_per_step={prompts}", f"steps={STEPS}", f"run_dir={tmp_path / name}"]
    sizes.append(f"servers.retry_seconds={seconds}")
    with fake_fleet.serve(replicas) as trainer:
        return run_results(load(trainer, replicas, *sizes), **options)


def versions_of(trajectories):
    return [
        {run[0] for record in step for run in record["senior_versions"]} for step in trajectories
    ]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("losses", [[], [3], [3, 9], [0, 1, 2]])
@pytest.mark.parametrize("down_seconds", [0.05, None])
def test_a_run_is_the_same_on_any_number_of_replicas(
    world, three, load, tmp_path, count, losses, down_seconds, notes
):
    alone = run_on([FakeReplica(world)], load, tmp_path, "alone")
    replicas = three[:count]
    replicas[0].losses, replicas[0].down_seconds = list(losses), down_seconds
    if losses:
        wait_for_loss(replicas[1:], notes)
    several = run_on(
        replicas,
        load,
        tmp_path,
        "several",
        on_step=lambda line: forget_prompts(replicas),
    )
    assert several[:2] == alone[:2]
    assert versions_of(several[1]) == [{0}, {1}, {2}]
    assert [line["rollout/replicas"] for line in alone[2]] == [1] * STEPS
    retried = sum(line["rollout/prompts_retried"] for line in several[2])
    assert bool(retried) == bool(losses)
    # All but the last sample of a replica that is lost for good came before.
    if losses and down_seconds is None:
        assert len(replicas[0].drawn) == losses[0]
        assert several[2][-1]["rollout/replicas"] == count - 1


def test_a_replica_that_missed_publications_gets_the_weights_before_it_draws(
    three, load, tmp_path, notes
):
    lost, *others = three
    lost.losses, lost.down_seconds = [2], None
    wait_for_loss(others, notes)
    # It gets the third prompt when the pool has the samples of the first one.
    lost.delay = lambda: fakes.wait_until(lambda: len(lost.drawn) < 2 or len(lost.submitted) == 3)

    def on_step(line):
        forget_prompts(three)
        if line["step"] == 2:
            lost.delay = lambda: None
            lost.come_back()
            for replica in others:
                before = replica.delay
                replica.delay = lambda before=before: (
                    fakes.wait_until(lambda: len(lost.drawn) > 2),
                    before(),
                )

    _, trajectories, lines = run_on(three, load, tmp_path, "run", prompts=9, on_step=on_step)
    assert versions_of(trajectories) == [{0}, {1}, {2}]
    assert [line["rollout/replicas"] for line in lines] == [3, 2, 3]
    assert any("it is left out until it answers again" in note for note in notes)
    assert f"{lost.address} is behind: publishing version 2" in notes
    assert f"{lost.address} answers again" in notes


def test_a_run_without_any_replica_left_ends_with_the_error(three, load, tmp_path):
    def on_step(line):
        for replica in three:
            replica.down_seconds = None
            replica.lose()

    with pytest.raises(UnavailableError, match="is down"):
        run_on(three, load, tmp_path, "run", on_step=on_step, seconds=0.2)


def test_an_evaluation_does_without_a_lost_replica(three, load, tmp_path):
    with fake_fleet.serve(three) as trainer, open_session(load(trainer, three)) as session:
        whole = evaluate(session)["solo"].summary()
        three[1].down_seconds = None
        three[1].lose()
        assert evaluate(session)["solo"].summary() == whole


def test_replicas_are_updated_in_turn_while_the_others_draw(world, three, load, tmp_path):
    stale = "objective.max_staleness=1"
    prompts = [Prompt([i], seed=i, num_samples=2, sampling={"max_tokens": 4}) for i in range(80)]
    answers, over = [], threading.Event()
    with fake_fleet.serve(three) as trainer, open_session(load(trainer, three, stale)) as session:
        # Each draws while it is drained, and the rest after the publication.
        for replica, drained in zip(three, session.rollouts.replicas, strict=True):
            replica.delay = lambda drained=drained: fakes.wait_until(
                lambda: over.is_set() or drained.updates
            )
        work = threading.Thread(
            target=lambda: answers.extend(session.generate(prompts, rule=WeightsRule.ANY_SINCE))
        )
        work.start()
        fakes.wait_until(lambda: all(replica.streams for replica in three))
        world.version = 1
        before = [len(replica.drawn) for replica in three]
        session.publish()
        during = [len(replica.drawn) for replica in three]
        assert work.is_alive()
        fakes.wait_until(lambda: all(replica.streams for replica in three))
        over.set()
        work.join()
    # No replica had a call while it got its weights, and each drew before and after.
    assert [replica.updates for replica in three] == [[0]] * 3
    assert all(b < d < len(r.drawn) for b, d, r in zip(before, during, three, strict=True))
    assert [len(targets) for targets in world.targets_of_publications] == [1, 1, 1]
    written = [{run.weights.version for run in one.senior_versions} for g in answers for one in g]
    assert all(len(versions) == 1 for versions in written)
    assert set().union(*written) == {0, 1}
    expected = [
        [fakes.sample(prompt.message(), i, 0).response_token_ids for i in range(2)]
        for prompt in prompts
    ]
    assert [[one.response_token_ids for one in group] for group in answers] == expected


def test_without_staleness_every_replica_is_updated_at_once(world, three, load):
    with fake_fleet.serve(three) as trainer, open_session(load(trainer, three)) as session:
        world.version = 1
        session.publish()
    assert [len(targets) for targets in world.targets_of_publications] == [3]


def test_a_publication_that_no_replica_gets_fails(three, load):
    patience = "servers.retry_seconds=0.2"
    with (
        fake_fleet.serve(three) as trainer,
        open_session(load(trainer, three, patience)) as session,
    ):
        for replica in three:
            replica.refuses_updates = True
        with pytest.raises(UnavailableError) as caught:
            session.publish()
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        three[0].refuses_updates = False
        session.publish()
        assert [replica.lost for replica in session.rollouts.replicas] == [False, True, True]


def test_a_publication_is_tried_again_until_a_replica_gets_it(three, load, notes):
    with fake_fleet.serve(three) as trainer, open_session(load(trainer, three)) as session:
        for replica in three:
            replica.refuses_updates = True
        work = threading.Thread(target=session.publish)
        work.start()
        fakes.wait_until(lambda: any("trying again" in note for note in notes))
        three[1].refuses_updates = False
        work.join()
        assert [bool(replica.updates) for replica in three] == [False, True, False]
        assert [replica.lost for replica in session.rollouts.replicas] == [True, False, True]


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_survives_the_restart_of_all_its_servers(world, load, tmp_path, count):
    alone = run_on([FakeReplica(world)], load, tmp_path, "alone")
    replicas = [FakeReplica(world) for _ in range(count)]

    def on_step(line):
        for replica in replicas:
            replica.lose()
        world.failures += [fakes.error_status(14, "the trainer restarts")] * 3

    disturbed = run_on(replicas, load, tmp_path, "disturbed", on_step=on_step)
    assert disturbed[:2] == alone[:2]
