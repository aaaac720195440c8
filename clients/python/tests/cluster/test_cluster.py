"""Local clusters, with a stand-in for the server binaries."""

import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from fakes import wait_until

from tandem.cluster import keeper, local
from tandem.cluster.local import LocalCluster, find_binary, reachable_host
from tandem.errors import ConfigError, ServerStartError, StorageError
from tandem.rpc.transport import Connection
from tandem.settings.cluster import ClusterSettings

SERVER = """#!{python}
import os, signal, sys, time, yaml
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
config = yaml.safe_load(open(sys.argv[2]))
if "--check-config" in sys.argv:
    print("{{max_samples: 9, max_model_len: 9, max_queue: 9, junior_model: ''}}"); sys.exit()
if any(name.startswith("TANDEM__") for name in os.environ):
    print("a setting that is not in the file"); sys.exit(2)
if config.get("model") == "broken":
    print("no such model"); sys.exit(2)
if config.get("model") == "slow":
    time.sleep(60)
server = grpc.server(futures.ThreadPoolExecutor(2))
checker = health.HealthServicer(); checker.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(checker, server)
host = config["server"].get("host", "127.0.0.1")
wanted = config["server"].get("grpc_port", 0)
port = server.add_insecure_port(host + ":" + str(wanted)); server.start()
print('{{"event":"listening","grpc_port":%d,"metrics_port":1}}' % port, flush=True)
print("critic at", config.get("critic_address"), flush=True)
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
server.wait_for_termination()
"""


@pytest.fixture
def build_dir(tmp_path):
    for role in ("rollout", "trainer", "critic"):
        path = tmp_path / "build" / "services" / role / f"tandem-{role}-server"
        path.parent.mkdir(parents=True)
        path.write_text(SERVER.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path / "build"


def test_a_cluster_starts_all_servers_and_stops_them(build_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM__MAX_QUEUE", "7")  # a setting of some other server
    settings = ClusterSettings(
        directory=tmp_path / "logs", rollout=[{}, {}], trainer={"model": "m"}, critic={}
    )
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        assert len({server.address for server in cluster.servers}) == 4
        assert [server.name for server in cluster.rollouts] == ["rollout-0", "rollout-1"]
        assert cluster.critic.address in cluster.trainer.log.read_text()
        cluster.check()
    assert [server.process.returncode for server in cluster.servers] == [0] * 4


def test_servers_outlive_the_thread_that_started_them(build_dir, tmp_path):
    cluster = LocalCluster(
        ClusterSettings(directory=tmp_path / "logs", trainer={"model": "m"}), build_dir=build_dir
    )
    thread = threading.Thread(target=cluster.start)
    thread.start()
    thread.join()
    try:
        # A signal sent when the thread ends would arrive at once.
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.trainer.process.wait(1)
    finally:
        cluster.stop()
    assert cluster.trainer.process.returncode == 0


def test_servers_die_with_the_process_that_started_them(build_dir, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"directory": str(tmp_path), "trainer": {"model": "m"}}))
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", "up", file, "--json"],
        env=os.environ | {"TANDEM_BUILD_DIR": str(build_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    [server] = json.loads(process.stdout.readline())["servers"]
    process.kill()
    process.communicate()
    with Connection(server["address"]) as connection:
        wait_until(lambda: connection.health() != "SERVING")


def test_a_server_that_dies_is_reported_with_the_last_line_of_its_log(build_dir, tmp_path):
    settings = ClusterSettings(directory=tmp_path / "logs", trainer={"model": "broken"})
    with (
        pytest.raises(ServerStartError, match="trainer ended with code 2: no such model"),
        LocalCluster(settings, build_dir=build_dir),
    ):
        pass


def test_a_server_that_dies_is_reported_with_the_message_of_its_log(build_dir, tmp_path):
    binary = build_dir / "services" / "trainer" / "tandem-trainer-server"
    events = [
        {"ts": "t", "level": "info", "event": "loading", "role": "trainer"},
        {"ts": "t", "level": "error", "event": "load_failed", "message": "/m: no such model"},
        {"ts": "t", "level": "info", "event": "stopped"},
    ]
    lines = "\n".join(json.dumps(event) for event in events)
    binary.write_text(f"#!{sys.executable}\nprint({lines!r})\nraise SystemExit(1)\n")
    settings = ClusterSettings(directory=tmp_path / "logs", trainer={"model": "m"})
    with pytest.raises(ServerStartError) as caught, LocalCluster(settings, build_dir=build_dir):
        pass
    assert caught.value.message == "trainer ended with code 1: /m: no such model"


def test_without_a_variable_the_servers_are_those_that_the_repository_built():
    built = local._REPOSITORY / "build/release/bin"
    assert (local._REPOSITORY / "CMakeLists.txt").is_file(), built


def test_a_missing_binary_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_BUILD_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(ServerStartError) as caught:
        find_binary("tandem-rollout-server")
    assert "make build" in str(caught.value.hint)


def test_a_server_that_a_signal_ended_is_reported_with_the_signal_and_its_log(build_dir, tmp_path):
    settings = ClusterSettings(directory=tmp_path / "logs", trainer={"model": "m"})
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        cluster.trainer.process.kill()
        cluster.trainer.process.wait()
        with pytest.raises(ServerStartError, match="trainer ended with signal SIGKILL") as caught:
            cluster.check()
        assert str(cluster.trainer.log) in str(caught.value.hint)


def test_a_run_goes_on_without_a_rollout_server_as_long_as_another_one_runs(build_dir, tmp_path):
    settings = ClusterSettings(
        directory=tmp_path / "logs", rollout=[{"ranks": 2}, {}], trainer={"model": "m"}
    )
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        by_name = {server.name: server.process for server in cluster.servers}

        def kill(name):
            by_name[name].kill()
            by_name[name].wait()

        kill("rollout-0-rank-1")
        cluster.check(spare_rollouts=True)
        with pytest.raises(ServerStartError, match="rollout-0-rank-1 ended with signal SIGKILL"):
            cluster.check()
        # Rank 0 of the first server still runs, and cannot serve alone.
        kill("rollout-1")
        with pytest.raises(ServerStartError, match="rollout-0-rank-1"):
            cluster.check(spare_rollouts=True)


def test_a_trainer_cannot_be_spared(build_dir, tmp_path):
    settings = ClusterSettings(
        directory=tmp_path / "logs", rollout=[{}, {}], trainer={"model": "m"}
    )
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        cluster.trainer.process.kill()
        cluster.trainer.process.wait()
        with pytest.raises(ServerStartError, match="trainer ended with signal SIGKILL"):
            cluster.check(spare_rollouts=True)


def test_a_server_is_reached_where_it_binds(build_dir, tmp_path):
    settings = ClusterSettings(
        directory=tmp_path / "logs", trainer={"model": "m", "server": {"host": "127.0.0.2"}}
    )
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        assert cluster.trainer.address.startswith("127.0.0.2:")
        assert cluster.trainer.metrics_address.startswith("127.0.0.2:")


@pytest.mark.parametrize(
    ("bound", "reached"),
    [(None, "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]")],
)
def test_a_server_bound_to_all_interfaces_is_dialled_on_the_loopback_one(bound, reached):
    assert reachable_host(bound) == reached


def test_a_second_start_keeps_the_logs_of_the_first(build_dir, tmp_path):
    settings = ClusterSettings(directory=tmp_path / "cluster", trainer={"model": "m"})
    logs = []
    for _ in range(2):
        with LocalCluster(settings, build_dir=build_dir) as cluster:
            logs.append(cluster.trainer.log)
    root = tmp_path / "cluster" / "logs"
    assert logs == [root / f"attempt_{n}" / "trainer.log" for n in (1, 2)]
    assert all(log.exists() for log in logs)


def test_an_attempt_that_was_removed_is_not_in_the_way(build_dir, tmp_path):
    settings = ClusterSettings(directory=tmp_path / "cluster", trainer={"model": "m"})
    root = tmp_path / "cluster" / "logs"
    for name in ("attempt_1", "attempt_2"):
        (root / name).mkdir(parents=True)
    (root / "attempt_1").rmdir()
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        assert cluster.trainer.log == root / "attempt_3" / "trainer.log"


def test_a_host_that_is_no_text_is_named_before_anything_starts(build_dir, tmp_path):
    settings = ClusterSettings(directory=tmp_path, rollout=[{}, {"server": {"host": 5}}])
    cluster = LocalCluster(settings, build_dir=build_dir)
    with pytest.raises(ConfigError, match=r"rollout\.1\.server\.host: must be a string"), cluster:
        pass
    assert [server.name for server in cluster.servers] == ["rollout-0"]
    assert not (tmp_path / "logs" / "attempt_1" / "rollout-1.log").exists()


def test_the_first_ctrl_c_stops_a_start(build_dir, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"directory": str(tmp_path), "trainer": {"model": "slow"}}))
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", "up", file, "--json"],
        env=os.environ | {"TANDEM_BUILD_DIR": str(build_dir)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        [pid] = re.findall(r"trainer is starting \(pid (\d+)", process.stderr.readline())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_server_section_that_is_no_mapping_is_named(build_dir, tmp_path):
    settings = ClusterSettings(directory=tmp_path, rollout=[{}, {"server": 7}])
    with (
        pytest.raises(ConfigError, match=r"rollout\.1\.server: must be a mapping, not 7"),
        LocalCluster(settings, build_dir=build_dir),
    ):
        pass


def test_a_directory_that_cannot_be_made_is_named(build_dir, tmp_path):
    (tmp_path / "file").write_text("")
    settings = ClusterSettings(directory=tmp_path / "file", trainer={"model": "m"})
    with (
        pytest.raises(ConfigError, match=f"directory: {tmp_path / 'file'}: Not a directory"),
        LocalCluster(settings, build_dir=build_dir),
    ):
        pass


def test_a_full_disk_is_named_at_once(build_dir, tmp_path, monkeypatch):
    """The start does not wait for a log that can never report readiness."""
    settings = ClusterSettings(directory=tmp_path / "logs", trainer={"model": "slow"})
    real = Path.write_bytes

    def full(path, data):
        if path.is_relative_to(tmp_path / "logs"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with (
        pytest.raises(StorageError, match=f"^directory: {tmp_path / 'logs'}: No space left"),
        LocalCluster(settings, build_dir=build_dir),
    ):
        pass


def test_only_rank_zero_of_a_server_is_announced(build_dir, tmp_path, notes):
    settings = ClusterSettings(directory=tmp_path / "logs", trainer={"model": "m", "ranks": 2})
    with LocalCluster(settings, build_dir=build_dir):
        pass
    assert [line.split(" at ")[0] for line in notes if " serves at " in line] == ["trainer serves"]


def test_a_dead_rollout_server_of_a_run_is_started_again_at_its_address(build_dir, tmp_path, notes):
    settings = ClusterSettings(directory=tmp_path / "logs", rollout=[{}, {"ranks": 2}], trainer={})
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        cluster.keep_rollouts()
        before = list(cluster.servers)
        for dead in (before[0], before[2]):  # The second one is the other rank of its server.
            dead.process.kill()
            # It is about to be started again, so nothing is wrong.
            cluster.check(spare_rollouts=True)
        wait_until(lambda: sum("is serving again" in one for one in notes) == 2)
        after = cluster.servers
        assert [one.name for one in after] == [one.name for one in before]
        assert [one.address for one in cluster.rollouts] == [before[0].address, before[1].address]
        assert all(server.running for server in after)
        assert any("rollout-0 ended with signal SIGKILL" in one for one in notes)
        assert (tmp_path / "logs" / "logs" / "attempt_1" / "rollout-0-again-1.log").exists()
        assert after[-1] is before[-1]
        cluster.trainer.process.kill()
        cluster.trainer.process.wait()
        with pytest.raises(ServerStartError, match="trainer ended with signal SIGKILL"):
            cluster.check(spare_rollouts=True)


def test_a_rollout_server_that_dies_again_and_again_is_left(
    build_dir, tmp_path, monkeypatch, notes
):
    monkeypatch.setattr(keeper, "_LOOK_SECONDS", 0.01)
    settings = ClusterSettings(directory=tmp_path / "logs", rollout=[{}])
    with LocalCluster(settings, build_dir=build_dir) as cluster:
        cluster.keep_rollouts()
        for count in range(1, keeper.MOST_STARTS + 1):
            cluster.rollouts[0].process.kill()
            wait_until(lambda count=count: sum("is serving again" in one for one in notes) == count)
        cluster.rollouts[0].process.kill()
        wait_until(lambda: "it died 4 times and is not started again" in notes[-1])
        with pytest.raises(ServerStartError, match="rollout-0 ended with signal SIGKILL"):
            cluster.check(spare_rollouts=True)


def test_a_lost_rank_is_reported_with_its_reason(build_dir, tmp_path):
    binary = build_dir / "services" / "trainer" / "tandem-trainer-server"
    lost = {"level": "error", "event": "rank_failure", "failure": "rank 1 has been silent for 15s"}
    failed = {"level": "error", "event": "load_failed", "message": "/m: no such file"}
    binary.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        f"print(json.dumps({failed!r} if rank else {lost!r}), flush=True)\n"
        "time.sleep(0 if rank else 1)\nsys.exit(1)\n"
    )
    settings = ClusterSettings(directory=tmp_path / "logs", trainer={"model": "m", "ranks": 2})
    with pytest.raises(ServerStartError) as caught, LocalCluster(settings, build_dir=build_dir):
        pass
    assert caught.value.message == (
        "trainer ended with code 1: rank 1 has been silent for 15s; trainer-rank-1 ended with "
        "code 1: /m: no such file"
    )
