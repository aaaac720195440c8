"""Commands other than those that train, against fake servers."""

import fcntl
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import fakes
import pytest
import typer
import yaml
from commands import tandem

from tandem import __version__ as tandem_version
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.trainer.v1.trainer_pb2 import StepReport
from tandem.cli import app
from tandem.cluster import registry
from tandem.rpc.credentials import NO_CREDENTIALS


def test_every_paragraph_of_a_help_fits_a_terminal_of_80_columns():
    commands = list(typer.main.get_command(app.app).commands.values())
    for one in commands:
        commands += getattr(one, "commands", {}).values()
    texts = [text for one in commands for text in (one.help or "").split("\n")[1:]]
    assert texts
    assert max(map(len, texts)) <= 78


def test_eval_reports_accuracy_and_pass_at_k(run_file):
    arguments = ["eval.samples=4", "eval.k=[1, 4]", "eval.temperature=1.0"]
    out = json.loads(tandem("eval", run_file, *arguments, "--json").stdout)
    assert out["checkpoint"] is None
    assert list(out["evaluations"]) == ["solo"]
    solo = out["evaluations"]["solo"]
    assert solo["prompts"] == 20
    assert solo["pass_at"]["1"] == pytest.approx(solo["accuracy"])


def test_eval_measures_the_modes_that_are_asked_for(world, run_file):
    modes = ["--mode", "handoff", "--mode", "legibility"]
    out = json.loads(tandem("eval", run_file, "eval.modes=[solo]", *modes, "--json").stdout)
    handoff, legibility = out["evaluations"].values()
    assert [handoff["mode"], legibility["mode"]] == ["handoff", "legibility"]
    assert legibility["junior/nats_per_token"] == 2.0
    shown = tandem("eval", run_file, "--mode", "handoff,legibility").stdout.splitlines()
    assert shown[1:] == [
        "\tvalue\t95 % interval",
        f"handoff: accuracy\t0.0%\t0.0% to {handoff['accuracy_high']:.1%}",
        f"handoff: rounds\t{handoff['rounds/mean']:.2f}\t",
        f"handoff: tokens by the senior\t{handoff['tandem/senior_token_fraction']:.1%}\t",
        "handoff: cut after 150 rounds\t0\t",
        *(
            f"legibility: {whose}, nats/token\t{legibility[f'{whose}/nats_per_token']:.3f}\t"
            f"{legibility[f'{whose}/nats_per_token_low']:.3f} to "
            f"{legibility[f'{whose}/nats_per_token_high']:.3f}"
            for whose in ("junior", "senior", "gap")
        ),
    ]
    said = tandem("eval", run_file, "--mode", "duo", check=2).stderr
    assert "tandem: --mode: must be one of solo, junior_solo, tandem, handoff, " in said
    assert ", not 'duo'" in said
    world.has_junior = False
    error = json.loads(tandem("eval", run_file, *modes, "--json", check=2).stderr)
    assert error["error"] == "ConfigError"
    assert error["message"].startswith("eval.modes: handoff, legibility: the rollout server at ")


def test_eval_of_a_checkpoint_and_of_the_last_one_of_a_run(world, run_file, tmp_path):
    run = tmp_path / "run"
    tandem("train", run_file, "checkpoint.every=2")
    world.published = 0
    out = json.loads(tandem("eval", run_file, "--checkpoint", run, "--json").stdout)
    assert out["checkpoint"] == str(run / "checkpoints" / "step_000004")
    assert out["evaluations"]["solo"]["version/senior"] == 4
    path = run / "checkpoints" / "step_000002"
    shown = tandem("eval", run_file, "--checkpoint", path).stdout
    assert f"senior version 2, from {path}" in shown
    assert "senior version 2, as currently served" in tandem("eval", run_file).stdout
    (run / "state.json").unlink()
    assert "has no checkpoint" in tandem("eval", run_file, "--checkpoint", run, check=2).stderr


def test_generate_score_health_and_status_print_text_and_json(address, run_file, tmp_path):
    model = ["--tokenizer", tmp_path / "model"]
    record = json.loads(
        tandem(
            "generate", "w1 w2", "--rollout", address, *model, "--json", "--strategy", "word"
        ).stdout
    )
    assert record["tandem"]["selection_strategy"] == "word"
    scores = json.loads(tandem("score", "w1 w2 w3", "--rollout", address, "--json").stdout)
    assert scores["scores"][0]["junior_nats_per_token"] == 2.0
    assert "tokens=3" in tandem("score", "w1 w2 w3", "--rollout", address).stdout
    tandem("health", address)
    assert "Connection refused" in tandem("health", "127.0.0.1:1", check=3).stdout
    status = tandem("status", "--rollout", address, "--trainer", address, "--critic", "127.0.0.1:1")
    assert "SERVING" in status.stdout
    assert "storage=bfloat16 junior_storage=int4" in status.stdout
    wrong = tandem(
        "status", "--rollout", address, "--trainer", address, "--critic", address, "--json"
    )
    *_, critic = json.loads(wrong.stdout)["servers"]
    assert critic["problem"] == "not a critic server"
    error = tandem("generate", "x", "--rollout", "127.0.0.1:1", "--json", check=3).stderr
    assert json.loads(error)["code"] == "UNAVAILABLE"
    said = json.loads(error)["message"]
    assert said.startswith("cannot connect to the server at 127.0.0.1:1: ")
    # Text after "--" is a prompt, not an option.
    error = tandem("generate", "--rollout", "127.0.0.1:1", "--", "--json", check=3).stderr
    assert error.startswith("tandem: ")


def test_status_names_a_server_that_does_not_use_the_speculator(world, address):
    world.has_speculator = True
    options = ["status", "--rollout", address, "--trainer", address]
    forgotten = tandem(*options).stdout
    assert "has no senior.speculator: the trainer's speculator is not used" in forgotten
    assert "speculator=trains" in forgotten
    world.speculator_version = 4
    shown = tandem(*options).stdout
    assert "speculator_version=4" in shown
    assert "senior.speculator" not in shown


def test_generate_separates_responses_and_passes_its_options_on(world, address, run_file, tmp_path):
    asked = []
    common = ["--rollout", address, "--tokenizer", tmp_path / "model", "--max-tokens", 4]
    texts = {
        stream: tandem("generate", "w1 w2", "w3", *common, "--samples", 2, stream).stdout
        for stream in ("--stream", "--no-stream")
    }
    assert texts["--stream"] == texts["--no-stream"]
    lines = texts["--stream"].splitlines()
    assert lines[0] == "--- w1 w2 (sample 1 of 2) ---"
    assert [line for line in lines if line.startswith("--- ")][1:] == [
        "--- w1 w2 (sample 2 of 2) ---",
        "--- w3 (sample 1 of 2) ---",
        "--- w3 (sample 2 of 2) ---",
    ]
    assert len(lines) == 8
    assert tandem("generate", "w1 w2 w3" * 20, *common).stdout.startswith(
        f"--- {'w1 w2 w3' * 20} ---\n"
    )
    options = ["--strategy", "chunk", "--chunk-size", 3, "--top-p", 0.5, "--top-k", 7]
    options += ["--min-p", 0.25, "--stop", "w5", "--stop", "w6", "--json"]
    record = json.loads(tandem("generate", "w1", *common, *options).stdout)
    assert record["tandem"]["chunk_size"] == 3
    sampling = record["sampling"]
    assert [sampling[key] for key in ("top_p", "top_k", "min_p")] == [0.5, 7, 0.25]
    done = tandem("generate", "w1", *common, "--strategy", "chnk", check=2)
    assert done.stderr.startswith("tandem: --strategy: 'chnk' is not one of bernoulli, chunk,")
    world.on_prompt = lambda prompt: asked.append(prompt.speculative.acceptance_rule)
    drafts = ["--speculative", "ngram", "--acceptance-rule", "rejection_sampling"]
    drafted = tandem("generate", "w1", *common, *options, *drafts)
    assert json.loads(drafted.stdout) == record
    assert asked == [rollout_pb2.ACCEPTANCE_RULE_REJECTION_SAMPLING]
    done = tandem("generate", "w1", *common, "--acceptance-rule", "all", check=2)
    assert done.stderr.startswith(
        "tandem: --acceptance-rule: 'all' is not one of exact, rejection_s"
    )
    done = tandem("generate", "w1", *common, "--image", "a.png", check=2)
    assert "--image: needs --chat" in done.stderr
    done = tandem("generate", " ", *common, check=2)
    assert "PROMPT: ' ' has no tokens" in done.stderr
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }} {{ end }}")
    told = ("generate", "w1", *common, "--json", "--chat-template-kwargs", "{end: w9}")
    assert "--chat-template-kwargs: needs --chat" in tandem(*told, check=2).stderr
    prompts = []
    world.on_prompt = lambda prompt: prompts.append(list(prompt.prompt_token_ids))
    tandem(*told, "--chat")
    assert prompts == [[1, 9]]
    done = tandem(*told[:-1], "[1]", "--chat", check=2)
    assert "--chat-template-kwargs: must be a mapping" in done.stderr
    done = tandem("generate", "w1", *common, "--speculative", "eagle", check=2)
    assert done.stderr.startswith("tandem: --speculative: 'eagle' is not one of none, ngram,")
    for method, says in (
        ("eagle", "'eagle' is not one of"),
        ("heads", "heads: the rollout server"),
    ):
        where = ["--rollout", address, "--tokenizer", tmp_path / "model"]
        done = tandem("serve-openai", *where, "--speculative", method, check=2)
        assert done.stderr.startswith(f"tandem: --speculative: {says}")
    done = tandem("serve-openai", *where, "--acceptance-rule", "all", check=2)
    assert done.stderr.startswith(
        "tandem: --acceptance-rule: 'all' is not one of exact, rejection_s"
    )
    done = tandem("generate", "w1", *common, "--max-tokens", 200)
    assert done.stderr == (
        "warning: --max-tokens 200: the server's max_model_len of 128 leaves 127 tokens after a "
        "prompt of 1\n"
    )
    done = tandem("generate", "w1", *common, "--stop", "x" * 257, check=2)
    assert "has 257 bytes; a server accepts 1 to 256" in done.stderr
    assert "has 257 bytes" in done.stderr


def test_a_tokenizer_that_only_the_server_has_must_be_named(address, tmp_path):
    done = tandem("generate", "w1", "--rollout", address, check=2)
    assert f"--tokenizer: the server's model directory {tmp_path / 'model'}" in done.stderr


def test_commands_and_options_are_completed():
    def completed(line):
        environment = {"_TANDEM_COMPLETE": "complete_bash", "COMP_WORDS": line}
        environment["COMP_CWORD"] = str(len(line.split()) - 1)
        done = subprocess.run(
            [sys.executable, "-m", "tandem"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0
        return done.stdout.split()

    assert completed("tandem tr") == ["train"]
    assert completed("tandem train --dr") == ["--dry-run"]


def test_watch_prints_the_steps_of_a_trainer(address, world):
    ended = {"loss/total": 0.25, "policy/grad_norm": float("inf")}
    world.watched = [
        StepReport(run_id="mine-1", step=7, weights={"version": 7}, metrics=ended),
        StepReport(run_id="mine-1", step=8, skipped=True, skip_reason="no gradient"),
    ]
    shown = tandem("watch", "--trainer", address, "--steps", 2).stdout.splitlines()
    assert shown[1:] == [
        "mine-1 step 7: version 7, loss/total 0.25",
        "mine-1 step 8: version 0, skipped: no gradient",
    ]
    shown = tandem("watch", "--trainer", address, "--steps", 1, "--json").stdout
    assert json.loads(shown) == {
        "run_id": "mine-1",
        "step": 7,
        "version": 7,
        "skipped": None,
        "metrics": {"loss/total": 0.25, "policy/grad_norm": None},
    }


def test_version_prints_that_of_the_package():
    assert tandem("--version").stdout == f"tandem {tandem_version}\n"


def test_ctrl_c_while_the_command_is_imported_is_no_traceback():
    # The signal comes in the middle of the longest import.
    program = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["tandem", "status"]
runpy.run_module("tandem", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_commands_find_the_cluster_that_runs(address, run_file, tmp_path, monkeypatch, notes):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    servers = [
        {"role": "rollout", "rank": 0, "address": address},
        {"role": "trainer", "rank": 0, "address": address},
        {"role": "trainer", "rank": 1, "address": "127.0.0.1:1"},
    ]
    cluster = SimpleNamespace(
        settings=SimpleNamespace(directory=tmp_path),
        credentials=NO_CREDENTIALS,
        servers=[SimpleNamespace(describe=lambda server=server: server) for server in servers],
    )
    model = ["--tokenizer", tmp_path / "model"]
    fakes.write_tokenizer(tmp_path / "model")
    settings = yaml.safe_load(run_file.read_text())
    del settings["servers"]
    unaddressed = tmp_path / "unaddressed.yaml"
    unaddressed.write_text(yaml.safe_dump(settings))
    with registry.announced(cluster):
        tandem("generate", "w1", *model)
        tandem("score", "w1 w2", *model)
        shown = json.loads(tandem("status", "--json").stdout)["servers"]
        assert [(one["role"], one["address"]) for one in shown] == [
            ("rollout", address),
            ("trainer", address),
        ]
        health = json.loads(tandem("health", "--json").stdout)["servers"]
        assert [one["address"] for one in health] == [address, address]
        # A run without `cluster` finds the servers, too.
        found = yaml.safe_load(tandem("train", unaddressed, "--dry-run").stdout)["servers"]
        assert (found["rollout"], found["trainer"]) == ([address], address)
        other = tmp_path / "state" / "tandem" / "clusters" / "1.json"
        other.write_text("{}")
        with other.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            other.write_text(json.dumps({"directory": "/other", "servers": []}))
            for command in (["generate", "w1", *model], ["train", unaddressed]):
                said = tandem(*command, check=2).stderr
                assert f"2 clusters are running: /other, {tmp_path}" in said
        # The file is no longer locked: its process has ended.
        tandem("generate", "w1", *model)
        assert not other.exists()
    assert registry.clusters() == []
    assert not any("other commands" in note for note in notes)
    notes.clear()
    assert "no address is given" in tandem("health", check=2).stderr
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").touch()
    with registry.announced(cluster):
        assert registry.clusters() == []
    [note] = notes
    assert note.startswith("other commands cannot find these servers: ")


def test_usage_errors_exit_with_2(run_file):
    tandem("train", check=2)
    tandem("train", "/does/not/exist.yaml", check=2)
    assert "did you mean 'steps'" in tandem("train", run_file, "stepz=1", check=2).stderr
