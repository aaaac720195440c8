"""Multi-rank servers: their info and metrics, and how they end."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess

import harness
import pytest
import yaml
from harness import gauge, run_on, wait_until
from layouts import HEARTBEAT_SECONDS, STRATEGIES, ranked, ranked_rollout
from tandem.cluster.local import LocalCluster, find_binary, rank_environment
from tandem.errors import ServerStartError, TandemError
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.transport import Connection

PPO = {"objective": {"advantage_estimator": "gae"}}
# A run of which a checkpoint is saved after every step.
SAVING = PPO | {"checkpoint": {"every": 1}, "steps": 3}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_ends_its_rollout_server(models, tmp_path, rank, how):
    with harness.cluster(tmp_path, models, rollout=ranked_rollout()) as running:
        ranks = ranks_of(running, "rollout")
        for server in ranks:
            with Connection(server.address) as connection:
                assert connection.health() == "SERVING"
            assert gauge(server, "tandem_server_ranks") == 2
        os.kill(ranks[rank].process.pid, signal.Signals[how])
        wait_until(lambda: not ranks[1 - rank].running, seconds=60)
        assert re.search(rf"rank {rank}\b", ranks[1 - rank].log.read_text())
        ranks[rank].process.kill()  # a stopped process does not act on SIGTERM


def test_sigterm_to_rank_zero_ends_every_rank_of_a_rollout_server(models, tmp_path):
    with harness.cluster(tmp_path, models, rollout=ranked_rollout(junior=2)) as running:
        ranks = ranks_of(running, "rollout")
        ranks[0].process.terminate()
        wait_until(lambda: not any(server.running for server in ranks), seconds=40)
        assert [server.process.returncode for server in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({"tensor_parallel_size": 2}, 2, ""),
        (
            {"tensor_parallel_size": 2},
            3,
            "tensor_parallel_size: the senior is on the first 2 ranks and the junior on the first "
            "1, so the server needs 2 ranks, but it has 3",
        ),
        (
            {"tensor_parallel_size": 3},
            3,
            "tensor_parallel_size: 3 does not divide config.json.num_key_value_heads, which is 2",
        ),
        (
            {"tensor_parallel_size": 2, "junior_gpu_devices": [0]},
            2,
            "junior_gpu_devices: needs compute.device cuda, not cpu",
        ),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            2,
            "enable_expert_parallel: 2 ranks cannot divide the experts of a ",
        ),
    ],
)
def test_an_impossible_rollout_layout_is_refused_with_the_numbers(
    models, tmp_path, changes, ranks, says
):
    section = harness.sections(models, rollout=changes)["rollout"]
    check_config("tandem-rollout-server", section, tmp_path / "rollout.yaml", ranks, says)


@pytest.fixture(scope="module")
def servers(models, tmp_path_factory):
    """A trainer and a critic of two ranks each."""
    directory = tmp_path_factory.mktemp("ranks")
    with harness.cluster(directory, models, trainer=ranked(), critic=ranked()) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(servers, models, tmp_path_factory):
    """The metrics of a PPO run that saves every step and loses no rank."""
    return run_on(servers, models, tmp_path_factory.mktemp("undisturbed"), **SAVING)


def check_config(binary, section, file, ranks, says):
    """Runs --check-config on rank 0 of `ranks`: accepted, or refused with the text `says`."""
    file.write_text(yaml.safe_dump(section))
    checked = subprocess.run(
        [find_binary(binary), "--config", file, "--check-config"],
        env=os.environ | rank_environment(0, ranks, port=1),
        capture_output=True,
        text=True,
    )
    assert checked.returncode == (2 if says else 0), checked.stderr
    assert says in checked.stderr


def ranks_of(running: LocalCluster, role: str):
    """The processes of a role, in the order of their ranks."""
    return [server for server in running.servers if server.role == role]


def test_every_rank_has_health_and_metrics(servers):
    for role in ("trainer", "critic"):
        ranks = ranks_of(servers, role)
        assert [server.rank for server in ranks] == [0, 1]
        assert [server.name for server in ranks] == [role, f"{role}-rank-1"]
        for server in ranks:
            with Connection(server.address) as connection:
                assert connection.health() == "SERVING"
            assert gauge(server, "tandem_server_rank") == server.rank
            assert gauge(server, "tandem_server_ranks") == 2


def test_only_rank_zero_is_called(servers):
    follower = ranks_of(servers, "trainer")[1]
    with (
        TrainerClient(follower.address, timeout_seconds=5) as client,
        pytest.raises(TandemError, match=r"(?i)unimplemented"),
    ):
        client.info()


def test_ranks_with_different_configurations_do_not_start(models, tmp_path, monkeypatch):
    start = LocalCluster._start_process

    def with_another_seed(self, section, name, config_file, config, rank=0, *further):
        if rank == 1:
            other = config_file.with_name("other.yaml")
            other.write_text(config_file.read_text() + "value_head_seed: 7\n")
            config_file = other
        return start(self, section, name, config_file, config, rank, *further)

    monkeypatch.setattr(LocalCluster, "_start_process", with_another_seed)
    with (
        pytest.raises(ServerStartError, match=r"rank 1 has another configuration: .*seed: 7"),
        harness.cluster(tmp_path, models, critic=ranked()),
    ):
        pass


@pytest.mark.parametrize(
    ("strategy", "ranks", "says"),
    [
        (STRATEGIES["zero"], 2, ""),
        (STRATEGIES["tensor"], 2, ""),
        (
            STRATEGIES["tensor"],
            3,
            "strategy.tensor_model_parallel_size: 2 x context_parallel_size 1 x "
            "pipeline_model_parallel_size 1 = 2 ranks hold one replica of the model, which does "
            "not divide the server's 3 ranks",
        ),
        (
            {"name": "megatron", "pipeline_model_parallel_size": 8},
            8,
            "strategy.pipeline_model_parallel_size: 8 stages need 8 layers",
        ),
        (
            {"name": "megatron", "expert_model_parallel_size": 2},
            2,
            "strategy.expert_model_parallel_size: 2 ranks cannot divide the experts of a ",
        ),
        (
            {"name": "megatron", "expert_model_parallel_size": 2},
            3,
            "strategy.expert_model_parallel_size: 2 does not divide the 3 ranks that hold the same "
            "layers: context_parallel_size 1 x 3 replicas",
        ),
        ({"name": "single"}, 2, "strategy.name: single is for one rank, but the server has 2"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_numbers(models, tmp_path, strategy, ranks, says):
    section = harness.sections(models, trainer={"strategy": strategy})["trainer"]
    check_config("tandem-trainer-server", section, tmp_path / "trainer.yaml", ranks, says)


# `make test` loses the first rank and the last one, in both ways, in one server of each role.
QUICK_LOSSES = {("SIGKILL", 1, "trainer"), ("SIGSTOP", 0, "critic")}
LOSSES = [
    pytest.param(*loss, marks=[pytest.mark.slow][loss in QUICK_LOSSES :])
    for loss in itertools.product(("SIGKILL", "SIGSTOP"), (0, 1), ("trainer", "critic"))
]


@pytest.mark.parametrize(("how", "rank", "role"), LOSSES)
def test_a_lost_rank_ends_its_server_and_the_run_resumes(
    servers, undisturbed, models, tmp_path, role, rank, how
):
    section = ranked()
    with harness.cluster(tmp_path / "lost", models, trainer=section, critic=section) as running:
        ranks = ranks_of(running, role)
        victim, other = ranks[rank], ranks[1 - rank]

        def lose(line):
            if line["step"] == 2:
                os.kill(victim.process.pid, signal.Signals[how])
                wait_until(lambda: not other.running, seconds=10 * HEARTBEAT_SECONDS)
                victim.process.kill()  # a stopped process does not act on SIGTERM

        # Nobody starts the server again.
        servers_of_run = harness.addresses_of(running).model_dump() | {"retry_seconds": 2.0}
        with pytest.raises(TandemError):
            run_on(
                running,
                models,
                tmp_path / "run",
                on_step=lose,
                servers=servers_of_run,
                **SAVING,
            )
        assert re.search(rf"\brank {rank}\b", other.log.read_text())
        assert other.process.returncode == 1
    assert run_on(servers, models, tmp_path / "run", resume=True, **SAVING) == undisturbed


def test_sigterm_to_rank_zero_saves_and_ends_every_rank_of_a_trainer(models, tmp_path):
    saved = tmp_path / "saved"
    section = ranked() | {"shutdown_checkpoint_directory": str(saved)}
    with harness.cluster(tmp_path / "cluster", models, trainer=section) as running:
        with harness.trainer_client(running) as client:
            sample = SupervisedSample([1, 2], [3, 4, 5])
            client.train_step([sample], run_id="run", step=1, expected_version=0)
        ranks = ranks_of(running, "trainer")
        ranks[0].process.terminate()
        wait_until(lambda: not any(server.running for server in ranks), seconds=40)
        assert [server.process.returncode for server in ranks] == [0, 0]
    names = {file.name for file in (saved / "shutdown").iterdir()}
    assert {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer-00000-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors",
    } <= names
