"""How servers start, drain and lose their clients."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time

import harness
import pytest
from harness import prompts
from tandem.cluster import find_binary
from tandem.errors import CancelledError, DeadlineError
from tandem.requests import Prompt

ENDLESS = {"max_tokens": 100, "ignore_eos": True}
ROLES = ("rollout", "trainer", "critic")


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def many(count=200):
    return [
        Prompt([3, 4, 5], seed=i, num_samples=8, sampling=ENDLESS, tandem={"prob_senior": 0.5})
        for i in range(count)
    ]


def unfinished(running):
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
    from tandem.requests import submit

    events = rollout.stream([submit([p.named(i) for i, p in enumerate(many())])])
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


def test_pause_holds_sequences_and_resume_goes_on(rollout):
    expected = rollout.generate(prompts(2, {"enabled": False}))
    assert rollout.pause() == 0
    try:
        assert rollout.info().paused
        with rollout.open_stream() as stream:
            stream.submit([p.named(i) for i, p in enumerate(prompts(2, {"enabled": False}))])
            stream.half_close()
            rollout.resume()
            finished = {
                e.finished.request_id: e.finished.trajectory
                for e in stream
                if e.WhichOneof("event") == "finished"
            }
    finally:
        rollout.resume()
    assert [finished["prompt-0"], finished["prompt-1"]] == [group[0] for group in expected]


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
    sections = {"trainer": {}} if role == "trainer" else {}
    if role == "critic":
        sections = {"critic": {}}
    with harness.cluster(tmp_path, models, rollouts=int(role == "rollout"), **sections) as running:
        [server] = running.servers
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_sigterm_in_mid_stream_exits_with_0_within_the_drain_time(models, tmp_path):
    quick = {"server": {"drain_seconds": 1.0}}
    with (
        harness.cluster(tmp_path, models, rollout=quick) as running,
        harness.rollout_client(running) as client,
    ):
        from tandem.errors import RpcError
        from tandem.requests import submit

        events = client.stream([submit([p.named(i) for i, p in enumerate(many())])])
        next(events)
        [server] = running.servers
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(RpcError):
            for _ in events:
                pass
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("role", ROLES)
def test_command_line_of_the_servers(models, tmp_path, role):
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
    assert key in run("--help").stdout or "--config" in run("--help").stdout
    unknown = run("--config", config, "--check-config", f"{key}l=x")
    assert unknown.returncode == 2
    assert key in unknown.stderr + unknown.stdout
    assert run("--config", tmp_path / "missing.yaml").returncode == 2
    config.write_text(f"{key}: {tmp_path / 'nothing'}\n")
    broken = run("--config", config, "server.grpc_port=0", "server.metrics_port=0")
    assert broken.returncode != 0


def test_health_reflection_and_logs(pair):
    import grpc
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

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
