"""How servers start, drain and lose their clients."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import textwrap

import grpc
import harness
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from harness import prompts, wait_until
from tandem._proto.critic.v1 import critic_pb2
from tandem.cluster.local import find_binary
from tandem.errors import CancelledError, DeadlineError, NotImplementedByServerError, RpcError
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.requests import Prompt, SupervisedSample, submit
from tandem.rpc.wire import to_tensor

ENDLESS = {"max_tokens": 100, "ignore_eos": True}
ROLES = ("rollout", "trainer", "critic")


def many(count=200):
    """Prompts of more work than a test waits for."""
    return [
        Prompt([3, 4, 5], seed=i, num_samples=8, sampling=ENDLESS, tandem={"prob_senior": 0.5})
        for i in range(count)
    ]


def unfinished(running):
    """Number of sequences that run or wait in the rollout server."""
    server = running.rollouts[0]
    return harness.gauge(server, "tandem_sequences_running") + harness.gauge(
        server, "tandem_sequences_waiting"
    )


def test_killing_the_client_in_mid_stream_frees_its_sequences(pair):
    program = textwrap.dedent(
        """
        import sys
        from tandem import Prompt, RolloutClient
        prompts = [
            Prompt([3, 4, 5], seed=i, num_samples=8, stream_tokens=True,
                   sampling={"max_tokens": 100, "ignore_eos": True})
            for i in range(200)
        ]
        client = RolloutClient(sys.argv[1])
        client.generate(prompts, on_event=lambda event: print("event", flush=True))
        """
    )
    address = pair.rollouts[0].address
    process = subprocess.Popen(
        [sys.executable, "-c", program, address], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "event\n"
    assert unfinished(pair) > 0
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: unfinished(pair) == 0)
    with harness.rollout_client(pair) as client:
        assert client.generate(prompts(1, {"enabled": False}))


def test_leaving_the_stream_and_cancelling_prompts_free_sequences(pair, rollout):
    events = rollout.stream(submit([p.named(i) for i, p in enumerate(many())]))
    next(events)
    events.close()
    wait_until(lambda: unfinished(pair) == 0)

    with rollout.open_stream() as stream:
        stream.submit([p.named(i) for i, p in enumerate(many(20))])
        stream.cancel([f"prompt-{i}" for i in range(1, 20)])
        stream.half_close()
        kinds = {}
        for event in stream:
            kind = event.WhichOneof("event")
            if kind in ("finished", "failed"):
                kinds.setdefault(getattr(event, kind).request_id, set()).add(kind)
    assert kinds["prompt-0"] == {"finished"}
    assert "failed" in kinds["prompt-19"]
    wait_until(lambda: unfinished(pair) == 0)


def test_a_deadline_ends_a_generation(pair, rollout):
    with pytest.raises((DeadlineError, CancelledError)):
        rollout.generate(many(500), timeout_seconds=0.3)
    wait_until(lambda: unfinished(pair) == 0)


def test_an_open_stream_is_counted_before_its_first_prompt(pair, rollout):
    [server] = pair.rollouts
    with rollout.open_stream():
        wait_until(lambda: harness.gauge(server, "tandem_generate_streams") == 1)
    wait_until(lambda: harness.gauge(server, "tandem_generate_streams") == 0)


def test_pause_queues_what_an_open_stream_submits_and_resume_goes_on(pair, rollout):
    batch = [p.named(i) for i, p in enumerate(prompts(2, {"enabled": False}))]
    expected = rollout.generate(batch)
    with rollout.open_stream() as stream:
        try:
            assert rollout.pause() == 0
            stream.submit(batch)
            stream.half_close()
            wait_until(lambda: unfinished(pair) == 2)
            assert rollout.info().paused
            # The sequences wait in the queue: a pause holds none of them.
            assert rollout.pause() == 0
        finally:
            rollout.resume()
        finished = {
            e.finished.request_id: e.finished.trajectory
            for e in stream
            if e.WhichOneof("event") == "finished"
        }
    assert not rollout.info().paused
    assert [finished["prompt-0"], finished["prompt-1"]] == [group[0] for group in expected]


def test_pause_stops_a_running_stream_and_leaving_it_frees_what_is_held(pair, rollout):
    [server] = pair.rollouts
    try:
        with rollout.open_stream() as stream:
            batch = [p.named(i) for i, p in enumerate(many())]
            stream.submit([dataclasses.replace(p, stream_tokens=True) for p in batch])
            assert next(iter(stream)).WhichOneof("event") == "tokens"
            held = rollout.pause()
            assert held > 0
            passes = harness.gauge(server, "tandem_forward_passes_total")
            assert harness.gauge(server, "tandem_generation_paused") == 1
            assert harness.gauge(server, "tandem_sequences_running") == held
            assert rollout.pause() == held
            assert harness.gauge(server, "tandem_forward_passes_total") == passes
        wait_until(lambda: unfinished(pair) == 0)
    finally:
        rollout.resume()


def test_streamed_tokens_are_the_trajectory(rollout):
    batch = prompts(2, {"prob_senior": 0.5}, stream_tokens=True)
    streamed: dict[str, list[int]] = {}
    authors: dict[str, list[int]] = {}

    def take(event):
        if event.WhichOneof("event") == "tokens":
            ids = streamed.setdefault(event.tokens.request_id, [])
            assert event.tokens.offset == len(ids)
            ids.extend(event.tokens.token_ids)
            authors.setdefault(event.tokens.request_id, []).extend(event.tokens.authorship_mask)

    groups = rollout.generate(batch, on_event=take)
    for index, [trajectory] in enumerate(groups):
        assert streamed[f"prompt-{index}"] == harness.tokens(trajectory)
        assert authors[f"prompt-{index}"] == harness.mask(trajectory)


@pytest.mark.parametrize("role", ROLES)
def test_sigterm_drains_and_exits_with_0(models, tmp_path, role):
    sections = {} if role == "rollout" else {role: {}}
    with harness.cluster(tmp_path, models, rollouts=int(role == "rollout"), **sections) as running:
        [server] = running.servers
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("role", ["trainer", "critic"])
def test_sigterm_saves_updates_that_no_checkpoint_holds(models, tmp_path, role):
    flush = {"shutdown_checkpoint_directory": str(tmp_path / "flushed")}
    client_class = TrainerClient if role == "trainer" else CriticClient

    def serve(name):
        return harness.cluster(tmp_path / name, models, rollouts=0, **{role: flush})

    def learn(client, number):
        step = {"run_id": "r", "step": number, "request_id": str(number)}
        step["expected_version"] = number
        if role == "trainer":
            client.train_step([SupervisedSample([5, 6], [7, 8])], **step)
        else:
            numbers = {"old_values": to_tensor([0.0, 0.0]), "returns": to_tensor([1.0, 0.5])}
            tokens = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 8]}
            sample = critic_pb2.ValueSample(**tokens, **numbers)
            header = critic_pb2.TrainStepHeader(num_samples=1, **step)
            client.send_train_step(
                [
                    critic_pb2.TrainStepRequest(header=header),
                    critic_pb2.TrainStepRequest(sample=sample),
                ]
            )
        return client.info().server.weights

    def stop(running):
        [server] = running.servers
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0

    with serve("idle") as running:
        stop(running)
    assert not (tmp_path / "flushed").exists(), "there was nothing to save"
    with serve("undisturbed") as running, client_class(running.servers[0].address) as client:
        learn(client, 0)
        undisturbed = learn(client, 1)
        client.save_checkpoint(str(tmp_path / "saved"), "step_2")
        stop(running)
    assert not (tmp_path / "flushed").exists(), "a checkpoint held everything"
    with serve("first") as running, client_class(running.servers[0].address) as client:
        first = learn(client, 0)
        stop(running)
    with serve("second") as running, client_class(running.servers[0].address) as client:
        client.load_checkpoint(str(tmp_path / "flushed" / "shutdown"))
        assert client.info().server.weights == first
        assert learn(client, 1) == undisturbed


def test_sigterm_in_mid_stream_exits_with_0_within_the_drain_time(models, tmp_path):
    quick = {"server": {"drain_seconds": 1.0}}
    with (
        harness.cluster(tmp_path, models, rollout=quick) as running,
        harness.rollout_client(running) as client,
    ):
        # Seconds of work, in one batch that the queue holds.
        events = client.stream(submit([p.named(i) for i, p in enumerate(many(500))]))
        assert next(events).WhichOneof("event") == "finished"
        [server] = running.servers
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(RpcError):
            for _ in events:
                pass
        assert server.process.wait(30) == 0


# A critic reads its settings and its model as a trainer does.
@pytest.mark.parametrize(
    "role", ["rollout", "trainer", pytest.param("critic", marks=pytest.mark.slow)]
)
def test_a_server_exits_with_2_for_bad_settings_and_1_for_a_bad_model(models, tmp_path, role):
    binary = find_binary(f"tandem-{role}-server")
    key = "senior_model" if role == "rollout" else "model"
    config = tmp_path / "config.yaml"
    config.write_text(f"{key}: {models.senior}\n")

    def run(*arguments):
        return subprocess.run(
            [binary, *map(str, arguments)], capture_output=True, text=True, timeout=60
        )

    checked = run("--config", config, "--check-config", "server.grpc_port=1234")
    assert checked.returncode == 0, checked.stderr
    assert "1234" in checked.stdout
    assert run("--version").returncode == 0
    unknown = run("--config", config, "--check-config", f"{key}l=x")
    assert unknown.returncode == 2
    assert key in unknown.stderr + unknown.stdout
    assert run("--config", tmp_path / "missing.yaml").returncode == 2
    config.write_text(f"{key}: {tmp_path / 'nothing'}\n")
    broken = run("--config", config, "server.grpc_port=0", "server.metrics_port=0")
    assert broken.returncode == 1, broken.stderr
    assert str(tmp_path / "nothing") in broken.stderr + broken.stdout


def test_servers_have_reflection_a_ready_gauge_and_json_logs(pair):
    names = {
        "rollout": {"tandem.rollout.v1.RolloutService", "tandem.weights.v1.WeightService"},
        "trainer": {"tandem.trainer.v1.TrainerService"},
    }
    for server in pair.servers:
        with grpc.insecure_channel(server.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert names[server.role] <= set(database.get_services())
            for name in names[server.role]:
                assert DescriptorPool(database).FindServiceByName(name).methods
        assert harness.gauge(server, "tandem_server_ready") == 1
        for line in server.log.read_text().splitlines():
            json.loads(line)


def test_a_client_of_another_role_is_told_the_role_that_it_needs(pair):
    trainer, rollout = pair.trainer.address, pair.rollouts[0].address
    for client, role in (
        (RolloutClient(trainer), "rollout"),
        (TrainerClient(rollout), "trainer"),
        (CriticClient(trainer), "critic"),
    ):
        with client, pytest.raises(NotImplementedByServerError) as caught:
            client.info()
        assert f"is this a {role} server" in caught.value.hint


def test_every_metric_that_a_server_exports_is_documented(pair, rollout):
    rollout.generate(prompts(1, {"prob_senior": 0.5}))
    document = (harness.REPOSITORY / "docs/reference/metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", document, re.MULTILINE))
    for server in pair.servers:
        exported = dict(
            re.findall(r"^# TYPE (\w+) (\w+)$", harness.metrics_text(server), re.MULTILINE)
        )
        assert "tandem_server_ready" in exported
        assert exported.items() <= documented.items()
