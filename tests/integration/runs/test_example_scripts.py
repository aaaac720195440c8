"""The scripts of examples/scripts, as a user runs them, with tiny models."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import harness
import pytest
import tandem
import yaml

SCRIPTS = harness.REPOSITORY / "examples/scripts"
# The Python of `make .venv-verifiers/.installed`, which `make test` makes.
WITH_VERIFIERS = harness.REPOSITORY / ".venv-verifiers/bin/python"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def chatting(models, tmp_path_factory):
    """Tiny models whose senior has a chat template."""
    folder = tmp_path_factory.mktemp("chatting")
    senior = shutil.copytree(models.senior, folder / "senior")
    (senior / "chat_template.jinja").write_text(TEMPLATE)
    return harness.Models(senior, models.junior, models.other_vocabulary)


@pytest.fixture(scope="module")
def servers(chatting, tmp_path_factory):
    """The servers of cluster.yaml."""
    trainer = {"junior_model": str(chatting.junior)}
    folder = tmp_path_factory.mktemp("servers")
    with harness.cluster(folder, chatting, trainer=trainer, critic={}) as running:
        yield running


def run(*command, cwd):
    """Runs a command as a user does, with the `tandem` of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # The package of the tests, also where PYTHONPATH is relative to another folder.
    package = str(Path(tandem.__file__).parents[1])
    environment = os.environ | {"PATH": path, "PYTHONPATH": package, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def addresses(servers):
    """The options that name the servers."""
    return ["--rollout", servers.rollouts[0].address, "--trainer", servers.trainer.address]


def train(script, servers, cwd, steps, python=sys.executable):
    """Runs a training script; returns the numbers that it printed, by name, one for each step."""
    printed = run(python, SCRIPTS / script, *addresses(servers), "--steps", steps, cwd=cwd)
    lines, (saved, *_) = printed.splitlines()[:steps], printed.splitlines()[steps:]
    assert [line.split(" ")[1].strip() for line in lines] == [str(n + 1) for n in range(steps)]
    assert saved == str(cwd / "runs" / script.removesuffix(".py") / f"step_{steps:06d}")
    with harness.rollout_client(servers) as rollout, harness.trainer_client(servers) as trainer:
        held = trainer.info().server.weights
        assert held.version == steps
        assert rollout.weights_version() == held
    names = re.findall(r"  (\S+/\S+) ", lines[0])
    return {name: [float(re.search(f"{name} (\\S+)", line)[1]) for line in lines] for name in names}


def test_grpo_learns_from_rewards_and_can_be_started_again(servers, tmp_path):
    first, numbers = (train("grpo.py", servers, tmp_path, 2) for _ in range(2))
    assert first == numbers
    assert list(numbers) == ["reward/mean", "policy/entropy", "policy/grad_norm"]
    # Rewards differ, and so there is something to learn.
    assert min(numbers["policy/grad_norm"]) > 0


def test_a_black_box_agent_is_learnt_from(servers, tmp_path):
    first, numbers = (train("black_box_agent.py", servers, tmp_path, 2) for _ in range(2))
    assert first == numbers
    assert min(numbers["policy/grad_norm"]) > 0
    # Two tries of up to 12 tokens each, in 32 episodes.
    assert min(numbers["tokens/response"]) > 32 * 12


# Runs a script that is killed when it calls METHOD of a client for the NUMBERth time.
KILLED = """
import itertools, os, runpy, signal, sys
from pathlib import Path
from tandem import SessionsClient, TrainerClient

method, number, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
client = {"save_checkpoint": TrainerClient, "reward": SessionsClient}[method]
plain, calls = getattr(client, method), itertools.count(1)


def call(*arguments, **options):
    if next(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments, **options)


setattr(client, method, call)
sys.argv = sys.argv[3:]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(("method", "number"), [("save_checkpoint", 2), ("reward", 74)])
def test_each_episode_is_learnt_from_once_whenever_the_loop_is_killed(
    servers, tmp_path, method, number
):
    """Between step 4 and its checkpoint, and while the agent is at work in step 3."""
    script, folder = SCRIPTS / "black_box_agent.py", tmp_path / "killed"
    folder.mkdir()
    options = [*addresses(servers), "--steps", "4", "--save-every", "2"]
    whole = run(sys.executable, script, *options, cwd=tmp_path).splitlines()
    with harness.trainer_client(servers) as trainer:
        learnt = trainer.info().server.weights
    (tmp_path / "killed.py").write_text(KILLED)
    with harness.openai_server(servers.rollouts[0].address) as url:
        options += ["--sessions", url]
        command = [sys.executable, tmp_path / "killed.py", method, number, script, *options]
        with pytest.raises(AssertionError, match="step 2"):
            run(*command, cwd=folder)
        assert json.loads((folder / "runs/black_box_agent/state.json").read_text())["step"] == 2
        held = totals(url)["finished"]
        assert held == 64 if method == "save_checkpoint" else held <= 9
        resumed = run(sys.executable, script, *options, "--resume", cwd=folder).splitlines()
        assert resumed[:2] == whole[2:4]
        with harness.trainer_client(servers) as trainer:
            assert trainer.info().server.weights == learnt
        after = totals(url)
        assert after["finished"] == 0
        # 32 episodes a step: those that were held are not drawn again; the others are.
        if method == "save_checkpoint":
            assert after["begun"]["first"] == 4 * 32
        else:
            assert after["begun"]["first"] > 4 * 32


def totals(url):
    """The counts of a server's sessions."""
    with urllib.request.urlopen(f"{url}/sessions") as answer:
        return json.load(answer)


@pytest.mark.skipif(
    not WITH_VERIFIERS.exists(), reason="verifiers is installed by make .venv-verifiers/.installed"
)
def test_an_environment_of_verifiers_is_learnt_from(servers, tmp_path):
    first, numbers = (
        train("verifiers_agent.py", servers, tmp_path, 2, WITH_VERIFIERS) for _ in range(2)
    )
    assert first == numbers
    assert min(numbers["policy/grad_norm"]) > 0
    # The two tries of an episode are turns of one response.
    assert min(numbers["tokens/response"]) > 32 * 12


def test_ppo_trains_the_critic_too(servers, tmp_path):
    first, numbers = (train("ppo.py", servers, tmp_path, 2) for _ in range(2))
    # The critic starts from its base model each time.
    assert first == numbers
    assert numbers["critic/loss"][0] > numbers["critic/loss"][1] > 0
    with harness.critic_client(servers) as critic:
        assert critic.info().server.weights.version == 2
    assert (tmp_path / "runs/ppo/critic/last/manifest.json").exists()


def test_distillation_brings_the_senior_to_its_junior(servers, tmp_path):
    divergence = train("distill_to_junior.py", servers, tmp_path, 8)["policy/junior_kl"]
    assert divergence[-1] < 0.9 * divergence[0]


def test_supervised_training_is_followed_by_grpo_from_its_checkpoint(chatting, tmp_path):
    # A tiny model answers nothing right, and a run that trains nothing is no success.
    (tmp_path / "reward.py").write_text(
        "def reward(prompt, response, **row):\n    return len(response)\n"
    )
    small = [
        f"reward.function={tmp_path}/reward.py:reward",
        f"cluster.model={chatting.senior}",
        *(f"cluster.{role}.max_model_len=128" for role in ("rollout", "trainer")),
        *(f"cluster.{role}.compute.num_threads=1" for role in ("rollout", "trainer")),
        "sampling.max_tokens=8",
        "batch.prompts_per_step=2",
        "batch.samples_per_prompt=2",
        "steps=2",
    ]
    for _ in range(2):
        # The second time there is nothing left to do.
        run("bash", SCRIPTS / "sft_then_grpo.sh", *small, cwd=tmp_path)
    sft, grpo = (tmp_path / "runs/sft_then_grpo" / name for name in ("sft", "grpo"))
    versions = [
        [line["version/senior"] for line in harness.json_lines(run / "metrics.jsonl")]
        for run in (sft, grpo)
    ]
    assert versions == [[1, 2], [3, 4]]
    config = yaml.safe_load((grpo / "config.yaml").read_text())
    assert config["start_from"] == str(sft)
    assert config["objective"]["kl_coefficient"] == 0


def test_every_checkpoint_of_a_run_is_evaluated(models, fresh_pair, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "one two", "answer": "three"}\n')
    harness.run_on(
        fresh_pair,
        models,
        tmp_path,
        steps=2,
        checkpoint={"every": 1},
        eval={"data": {"jsonl": str(tmp_path / "held_out.jsonl")}, "modes": ["solo", "legibility"]},
    )
    script = SCRIPTS / "evaluate_checkpoints.py"
    printed = run(sys.executable, script, tmp_path / "run", "eval.max_tokens=4", cwd=tmp_path)
    rows = [line.split("\t") for line in printed.splitlines()]
    assert [row[:2] for row in rows] == [
        [f"step_{step:06d}", mode] for step in (1, 2) for mode in ("solo", "legibility")
    ]
    assert all(re.fullmatch(r"accuracy [01]\.\d{3}", row[2]) for row in rows[::2])
    # The weights of the two checkpoints differ, and so does what they answer or how sure they are.
    assert rows[1][2:] != rows[3][2:]


def test_every_script_is_in_a_table_of_the_readme():
    tables = (harness.REPOSITORY / "examples" / "README.md").read_text()
    for file in [*SCRIPTS.glob("*.py"), *SCRIPTS.glob("*.sh")]:
        assert f"(scripts/{file.name})" in tables
