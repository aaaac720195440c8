"""The evaluations that a run makes around and between its steps, and the answers that it keeps."""

import json

import grpc
from commands import lines, records, tandem

from tandem.errors import RpcError
from tandem.run_directory.directory import evaluates_after
from tandem.run_directory.trajectories.files import evaluation_file, read_records
from tandem.settings.run import EvalSettings
from tandem.training import loop as train_module


def evaluated(run):
    return [(line["step"], line["mode"]) for line in lines(run / "evals.jsonl")]


def test_settings_say_after_which_steps(subtests):
    for settings, steps in [
        ({"every": 2}, [0, 2, 4, 5]),
        ({"every": 5}, [0, 5]),
        ({"every": 2, "at_start": False, "at_end": False}, [2, 4]),
        ({"every": 5, "at_end": False}, [0, 5]),
        ({"at_start": True}, [0]),
        ({"at_end": True}, [5]),
        ({}, []),
    ]:
        with subtests.test(settings=settings, steps=steps):
            found = EvalSettings(**settings)
            assert [step for step in range(6) if evaluates_after(found, step, 5)] == steps


def test_a_run_keeps_the_answers_of_its_evaluations(run_file, tmp_path):
    modes = "eval.modes=[solo, handoff, legibility]"
    tandem("train", run_file, "steps=2", "eval.at_start=true", "eval.samples=2", modes)
    run = tmp_path / "run"
    assert evaluated(run) == [(0, mode) for mode in ("solo", "handoff", "legibility")]
    found = {
        mode: read_records(evaluation_file(run, 0, mode))
        for mode in ("solo", "handoff", "legibility")
    }
    assert {mode: len(answers) for mode, answers in found.items()} == dict.fromkeys(found, 40)
    summary = {line["mode"]: line for line in lines(run / "evals.jsonl")}
    rewards = [answer["reward"] for answer in found["solo"]]
    assert sum(rewards) / len(rewards) == summary["solo"]["reward/mean"]
    assert found["solo"][3]["group_id"] == "eval/prompt-1"
    assert found["solo"][3]["sample_index"] == 1
    assert found["solo"][3]["place"] == "rows.jsonl:2"
    assert set(found["solo"][0]["authorship_mask"]) == {1}
    assert {0, 1} <= {one for answer in found["handoff"] for one in answer["authorship_mask"]}
    # The junior read what the senior wrote alone; nobody judged it.
    assert found["solo"][0]["junior_logprobs"] is None
    assert set(found["legibility"][0]["junior_logprobs"]) == {-2.0}
    assert found["legibility"][0]["reward"] is None
    assert found["legibility"][0]["text"] == found["solo"][0]["text"]


def test_view_shows_the_answers_of_an_evaluation(run_file, tmp_path):
    tandem("train", run_file, "steps=2", "eval.every=1", "eval.modes=[solo]")
    run = tmp_path / "run"
    shown = tandem("view", run, "--eval", "solo", "--count", 3).stdout.splitlines()
    assert shown[0].startswith("Solo evaluation after step 2, 3 of 20 trajectories: ")
    assert shown[2].startswith("eval/prompt-0\t")
    everything = tandem("view", run, "--eval", "solo", "--step", ":", "--json").stdout
    assert len(everything.splitlines()) == 3 * 20
    page = tmp_path / "page.html"
    tandem("view", run, "--eval", "solo", "--output", page)
    assert page.read_text().count('class="step"') == 3
    done = tandem("view", run, "--eval", "handoff", check=2)
    assert "holds no answers of handoff evaluations: it has solo" in done.stderr


def test_the_eval_command_writes_answers_that_view_shows(run_file, tmp_path):
    folder = tmp_path / "answers"
    tandem("eval", run_file, "--answers", folder, "--mode", "solo,handoff")
    assert sorted(file.name for file in folder.iterdir()) == ["handoff.parquet", "solo.parquet"]
    file = folder / "solo.parquet"
    done = tandem("view", file, "--tokenizer", tmp_path / "model", "--count", 1)
    assert "1 of 20 trajectories" in done.stdout
    assert "--tokenizer DIR" in tandem("view", file, check=2).stderr
    assert f"{folder} exists" in tandem("eval", run_file, "--answers", folder, check=2).stderr
    failed = tmp_path / "failed"
    tandem("eval", run_file, "--answers", failed, "data.jsonl=/none", check=2)
    assert not failed.exists()


def test_a_resumed_run_does_not_evaluate_twice(world, run_file, tmp_path):
    run = tmp_path / "run"
    tandem("train", run_file, "steps=2", "eval.every=2")
    assert evaluated(run) == [(0, "solo"), (2, "solo")]
    first = evaluation_file(run, 0, "solo").read_bytes()
    tandem("train", run_file, "steps=3", "eval.every=2", "--resume")
    assert evaluated(run) == [(0, "solo"), (2, "solo"), (3, "solo")]
    assert evaluation_file(run, 0, "solo").read_bytes() == first
    shown = tandem("train", run_file, "steps=3", "eval.every=2", "--resume").stdout
    assert "all steps are done already" in shown


def test_an_evaluation_that_failed_is_made_by_the_resumed_run(run_file, tmp_path, monkeypatch):
    run, evaluate = tmp_path / "run", train_module.evaluate

    def failing(session, modes):
        if session.trainer.info().server.weights.version == 2:
            # One mode is written before the other fails.
            monkeypatch.setattr(train_module, "evaluate", evaluate)
            raise RpcError("gone", code=grpc.StatusCode.UNAVAILABLE, method="Generate")
        return evaluate(session, modes)

    monkeypatch.setattr(train_module, "evaluate", failing)
    options = ("steps=2", "eval.at_end=true", "eval.modes=[solo, handoff]")
    done = tandem("train", run_file, *options, check=1)
    assert "saved after step 2, --resume continues from there" in done.stderr
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2]
    assert not (run / "evals.jsonl").exists()
    tandem("train", run_file, *options, "--resume")
    assert evaluated(run) == [(2, "solo"), (2, "handoff")]
    # A resumed run completes an evaluation that was cut off: only the missing part runs.
    kept = (run / "evals.jsonl").read_text().splitlines(keepends=True)
    (run / "evals.jsonl").write_text(kept[0])
    tandem("train", run_file, *options, "--resume")
    assert evaluated(run) == [(2, "solo"), (2, "handoff")]


def test_a_step_has_the_times_of_all_its_phases(run_file, tmp_path):
    tandem("train", run_file, "steps=3", "eval.every=2", "checkpoint={every: 3, at_end: false}")
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    there = {
        name: [line[f"time/{name}_seconds"] is not None for line in metrics]
        for name in ("trajectories", "eval", "checkpoint", "publish")
    }
    assert there == {
        "trajectories": [True] * 3,
        "eval": [False, True, True],
        "checkpoint": [False, False, True],
        "publish": [True] * 3,
    }
    for line in metrics:
        phases = [v for k, v in line.items() if k.startswith("time/") and v is not None]
        assert sum(phases) <= line["time_seconds"]


def test_own_responses_of_supervised_training_are_kept_beside_the_steps(run_file, tmp_path):
    tandem("sft", run_file, "sft.responses=senior", "sft.batch_size=2", "steps=2")
    assert [len(records(tmp_path / "run", step)) for step in (1, 2)] == [2, 2]
    line = lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert line["time/trajectories_seconds"] is not None


def test_evals_jsonl_is_json(run_file, tmp_path):
    tandem("train", run_file, "steps=1", "eval.at_end=true")
    [line] = (tmp_path / "run" / "evals.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
