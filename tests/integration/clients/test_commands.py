"""The `tandem` command against real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import harness
import numpy as np
import pytest
import yaml
from commands import tandem
from tandem.metrics import KEYS
from tandem.rpc.author_schedule import authorship_mask
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.seeds import prompt_seed
from tandem.settings import loading
from tokenizers import Tokenizer

# Objective of a run whose steps have a value for every metric.
EVERY_TERM = {
    "kl_coefficient": 0.01,
    "kl_placement": "reward",
    "junior_kl_coefficient": 0.01,
    "junior_kl_kind": "forward_sampled",
    "old_logprobs": "recomputed",
    "rejection_upper": 2.0,
}
# For commands that need a process of their own: they are sent a signal, or run beside the test.
COMMAND = [sys.executable, "-m", "tandem"]


@pytest.fixture(scope="module")
def files(models, tmp_path_factory):
    """A directory with run.yaml, a run that starts its own cluster."""
    directory = tmp_path_factory.mktemp("commands")
    cluster = {"directory": str(directory / "cluster"), **harness.sections(models, trainer={})}
    (directory / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    config = harness.run_settings(
        directory,
        models,
        None,
        cluster=str(directory / "cluster.yaml"),
        steps=2,
        reference="junior",
        objective=EVERY_TERM,
    )
    (directory / "run.yaml").write_text(loading.dump(config))
    return directory


@pytest.fixture(scope="module")
def run(files):
    tandem("train", files / "run.yaml")
    return files / "run"


def test_train_fills_every_metric_and_the_run_directory(run):
    metrics = harness.json_lines(run / "metrics.jsonl")
    assert [tuple(line) for line in metrics] == [KEYS] * 2
    for line in metrics:
        # Tokens of the junior have weight 0.
        missing = {key for key, value in line.items() if value is None}
        # The run has no teacher, shares no prefixes, evaluates nowhere and saves at its end.
        missing -= {
            "time/teachers_seconds",
            "policy/shared_token_fraction",
            "time/eval_seconds",
            *(["time/checkpoint_seconds"] if line["step"] < 2 else []),
        }
        others = ("mismatch/junior/", "distillation/", "loss/distillation")
        assert {key for key in missing if not key.startswith(others)} == set()
        fractions = line["tandem/senior_token_fraction"] + line["tandem/junior_token_fraction"]
        assert fractions == pytest.approx(1)
        assert line["mismatch/max_abs_logprob_diff"] < 1e-4
    assert (run / "checkpoints" / "step_000002" / "config.json").exists()


def test_authors_and_log_probs_follow_from_the_recorded_files_alone(run, models):
    """The files are the models, the tokenizer and the trajectories."""
    records = harness.trajectories(run, 1)
    tokenizer = Tokenizer.from_file(str(models.tokenizer / "tokenizer.json"))
    words = {i for piece, i in tokenizer.get_vocab().items() if piece.startswith("Ġ") and i > 1}
    assert len(records) == 12
    for index, record in enumerate(records):
        ids = record["response_token_ids"]
        assert record["seed"] == prompt_seed(0, 1, index // 4)
        assert record["authorship_mask"] == authorship_mask(
            ids, record["tandem"], record["seed"], record["sample_index"], words
        )
        assert record["text"] == tokenizer.decode(ids)
        for model, directory in (("senior", models.senior), ("junior", models.junior)):
            np.testing.assert_allclose(
                record[f"{model}_logprobs"],
                harness.reference_logprobs(directory, record["prompt_token_ids"], ids),
                rtol=0,
                atol=2e-4,
            )


def test_view_and_plot_show_what_was_recorded(run):
    records = [record for step in (1, 2) for record in harness.trajectories(run, step)]
    shown = tandem("view", run, "--step", "1:2", "--json").stdout.splitlines()
    assert [json.loads(line) for line in shown] == records
    lines = tandem("view", run, "--step", 2, "--count", 3, "--gap").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines[2:]] == ["step-2/prompt-0"] * 3
    # The models differ: some token is much more likely for one of them.
    assert re.search(r"\{[+-]\d+\.\d\}", "".join(lines[2:]))
    drawn = json.loads(tandem("plot", run, "--json").stdout)
    assert {"reward/mean", "policy/entropy", "policy/grad_norm"} <= set(drawn["metrics"])


def test_a_run_resumed_by_the_command_equals_an_uninterrupted_one(files, run):
    whole = files / "whole"
    tandem("train", files / "run.yaml", f"run_dir={whole}", "steps=3")
    tandem("train", files / "run.yaml", "steps=3", check=2)
    tandem("train", files / "run.yaml", "steps=3", "--resume")
    assert harness.metrics_without_clock(run) == harness.metrics_without_clock(whole)
    # The client knows the checkpoints that servers wrote as the run's own.
    done = tandem("train", files / "run.yaml", f"run_dir={whole}", "steps=1", "--clean")
    assert " is kept: " not in done.stdout
    assert [path.name for path in (whole / "checkpoints").iterdir()] == ["step_000001"]


def test_sft_lowers_its_loss(files):
    rows = files / "sft.jsonl"
    rows.write_text('{"prompt": "one two", "answer": " three"}\n' * 4)
    out = files / "sft"
    tandem("sft", files / "run.yaml", f"run_dir={out}", f"data.jsonl={rows}", "steps=5")
    losses = [line["loss/total"] for line in harness.json_lines(out / "metrics.jsonl")]
    assert losses[-1] < losses[0]


SPECULATOR = {"adapter": "mlp", "n_predict": 2, "optimizer": {"learning_rate": 0.01}}


@pytest.fixture(scope="module")
def own(files):
    """A run on the senior's own responses, which trains a speculator beside the senior."""
    out = files / "own"
    tandem(*own_responses(files, out), "steps=4", "checkpoint.every=1", "checkpoint.keep=0")
    return out


def own_responses(files, out):
    return (
        "sft", files / "run.yaml", f"run_dir={out}", "sft.responses=senior", "sft.batch_size=3",
        f"cluster.trainer.speculator={json.dumps(SPECULATOR)}",
    )  # fmt: skip


def test_sft_learns_the_senior_s_own_responses(own, models):
    for step in range(1, 5):
        records = harness.trajectories(own, step)
        assert [record["seed"] for record in records] == [
            prompt_seed(0, step, index, "sft") for index in range(3)
        ]
        # The senior of the step writes alone: the one that the step before left.
        senior = own / "checkpoints" / f"step_{step - 1:06d}" if step > 1 else models.senior
        for record in records:
            assert set(record["authorship_mask"]) == {1}
            assert record["senior_versions"][0][0] == step - 1
            np.testing.assert_allclose(
                record["senior_logprobs"],
                harness.reference_logprobs(
                    senior, record["prompt_token_ids"], record["response_token_ids"]
                ),
                rtol=0,
                atol=2e-4,
            )
    metrics = harness.json_lines(own / "metrics.jsonl")
    assert all(line["response/length_mean"] == line["tokens/response"] / 3 for line in metrics)
    assert metrics[-1]["speculator/loss"] < metrics[0]["speculator/loss"]


def test_a_resumed_run_on_own_responses_equals_an_uninterrupted_one(files, own):
    parted = files / "parted-own"
    # Drafts, which a resumed run may change, leave every token as it is.
    tandem(*own_responses(files, parted), "steps=2")
    tandem(
        *own_responses(files, parted), "steps=4", "checkpoint.keep=0", "--resume",
        "speculative.method=ngram",
    )  # fmt: skip
    assert harness.metrics_without_clock(parted) == harness.metrics_without_clock(own)
    for step in range(1, 5):
        resumed = harness.trajectories(parted, step)
        for trajectory in resumed:  # says which tokens were drafted
            trajectory["accepted_draft_mask"] = None
        assert resumed == harness.trajectories(own, step)


def test_eval_counts_pass_at_k(files):
    out = tandem(
        "eval", files / "run.yaml", "eval.samples=3", "eval.k=[1, 3]", "eval.temperature=1",
        "reward.correct_at=0.5", "--json",
    )  # fmt: skip
    result = json.loads(out.stdout)["evaluations"]["solo"]
    assert result["prompts"] == 10
    assert result["pass_at"]["1"] == pytest.approx(result["accuracy"])
    assert result["pass_at"]["3"] >= result["pass_at"]["1"]


def test_eval_answers_with_the_weights_of_a_checkpoint(files, run):
    arguments = ["eval", files / "run.yaml", "eval.samples=2", "eval.temperature=1", "--json"]
    arguments += ["--mode", "solo", "--mode", "handoff", "--mode", "legibility"]
    start = json.loads(tandem(*arguments).stdout)
    assert start["checkpoint"] is None
    state = json.loads((run / "state.json").read_text())
    trained = json.loads(tandem(*arguments, "--checkpoint", run).stdout)
    assert trained["checkpoint"] == str(run / state["trainer"])
    for mode, measure in (
        ("solo", "reward/mean"),
        ("handoff", "reward/mean"),
        ("legibility", "junior/nats_per_token"),
    ):
        before, after = start["evaluations"][mode], trained["evaluations"][mode]
        assert (before["version/senior"], after["version/senior"]) == (0, state["version"])
        assert before[measure] != after[measure]
    assert state["version"] > 0


def test_the_checkpoint_before_the_last_is_kept_for_a_crash_in_between(files):
    out = files / "pruned"
    tandem(
        "train", files / "run.yaml", f"run_dir={out}", "steps=3", "checkpoint.every=1",
        "checkpoint.keep=1",
    )  # fmt: skip
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "step_000002", "step_000003",
    ]  # fmt: skip
    assert json.loads((out / "state.json").read_text())["trainer"] == "checkpoints/step_000003"


def test_a_server_that_dies_in_a_run_is_reported_with_its_signal_and_log(files):
    errors = files / "died.txt"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, "train", files / "run.yaml", f"run_dir={files / 'died'}", "steps=500",
             "--json"],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["step"] == 1
        pattern = r"trainer is starting \(pid (\d+), log (\S+)\)"
        [(pid, log)] = re.findall(pattern, errors.read_text())
        os.kill(int(pid), signal.SIGKILL)
        process.communicate(timeout=120)
    assert process.returncode == 3
    assert "trainer ended with signal SIGKILL" in errors.read_text()
    assert log in json.loads(errors.read_text().splitlines()[-1])["hint"]


def test_up_serves_until_ctrl_c(files):
    process = subprocess.Popen(
        [*COMMAND, "up", files / "cluster.yaml", f"directory={files / 'up'}", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    servers = {s["role"]: s for s in json.loads(process.stdout.readline())["servers"]}
    rollout, trainer = (servers[role]["address"] for role in ("rollout", "trainer"))
    tandem("health", rollout, trainer)
    addresses = ["--rollout", rollout, "--trainer", trainer, "--critic", "127.0.0.1:1"]
    status = json.loads(tandem("status", *addresses, "--json").stdout)
    assert [server["health"] for server in status["servers"]] == [
        "SERVING", "SERVING", "UNREACHABLE",
    ]  # fmt: skip
    confused = tandem("status", "--rollout", trainer, "--trainer", rollout, "--json")
    *wrong, away = [server["problem"] for server in json.loads(confused.stdout)["servers"]]
    assert wrong == ["not a rollout server", "not a trainer server"]
    assert "refused" in away
    record = json.loads(
        tandem("generate", "the sum of", "--rollout", rollout, "--max-tokens", 5, "--json").stdout
    )
    assert len(record["authorship_mask"]) <= 5
    several = ["generate", "the sum of", "one two", "--rollout", rollout, "--samples", 2]
    several += ["--strategy", "chunk", "--chunk-size", 2]
    whole = tandem(*several, "--no-stream").stdout
    assert whole.count("(sample 2 of 2) ---") == 2
    assert tandem(*several, "--stream").stdout == whole
    scores = json.loads(tandem("score", "one two three", "--rollout", rollout, "--json").stdout)
    assert scores["scores"][0]["senior_nats_per_token"] > 0
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    tandem("health", rollout, check=3)


def test_ctrl_c_while_the_servers_start_stops_them_and_leaves_the_earlier_run(files, run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    process = subprocess.Popen(
        [*COMMAND, "train", files / "run.yaml", "--clean", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    started = [process.stderr.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for line in started:
        [pid] = re.findall(r"is starting \(pid (\d+)", line)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_ctrl_c_stops_a_run_gracefully_and_resume_ends_it(files):
    out = files / "interrupted"
    process = subprocess.Popen(
        [*COMMAND, "train", files / "run.yaml", f"run_dir={out}", "steps=500", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["step"] == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    done = harness.json_lines(out / "metrics.jsonl")[-1]["step"]
    tandem("train", files / "run.yaml", f"run_dir={out}", f"steps={done + 1}", "--resume")
    steps = [line["step"] for line in harness.json_lines(out / "metrics.jsonl")]
    assert steps == list(range(1, done + 2))


def test_watch_prints_the_steps_of_other_clients(fresh_pair):
    address = fresh_pair.trainer.address
    command = [*COMMAND, "watch", "--trainer", address, "--steps", "2", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    reports = {}
    with (
        subprocess.Popen(command, **pipes) as watch,
        harness.trainer_client(fresh_pair) as trainer,
    ):
        assert watch.stderr.readline() == f"watching {address}; Ctrl-C stops\n"
        try:
            # The trainer may do its first steps before it knows the watcher.
            while watch.poll() is None:
                step = len(reports) + 1
                sample = SupervisedSample([5, 6], [7, 8])
                reply = trainer.train_step(
                    [sample], run_id="r", step=step, expected_version=step - 1
                )
                reports[step] = reply.report
        finally:
            watch.kill()
        lines = [json.loads(line) for line in watch.stdout]
    assert watch.returncode == 0
    first, second = (one["step"] for one in lines)
    assert second == first + 1
    for one in lines:
        report = reports[one["step"]]
        assert (one["run_id"], one["version"]) == ("r", report.weights.version)
        assert one["metrics"]["loss/total"] == report.metrics["loss/total"]


def test_the_file_that_init_writes_can_be_trained(models, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "one two", "level": 1}\n{"question": "the sum", "level": 2}\n')
    file = tmp_path / "run" / "run.yaml"
    written = tandem("init", models.senior, rows, "--junior", models.junior, "-o", file, "--json")
    assert json.loads(written.stdout)["files"] == [str(file), str(file.with_name("reward.py"))]
    tandem("train", file, "steps=1", "batch.prompts_per_step=2", "sampling.max_tokens=8")
    [line] = harness.json_lines(tmp_path / "run" / "runs" / "run" / "metrics.jsonl")
    assert line["reward/mean"] < 0
    assert 0 < line["tandem/junior_token_fraction"] < 1
