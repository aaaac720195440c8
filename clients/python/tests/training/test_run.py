"""Whole runs against fake servers, through the command line."""

import itertools
import json
import signal
import subprocess
import sys
import threading

import fakes
import pytest
import yaml
from commands import contents, lines, tandem
from commands import records as records_of

from tandem.metrics import CLOCK_KEYS, KEYS
from tandem.settings import loading
from tandem.settings.run import RunSettings


def without_clock(metrics):
    return [{k: v for k, v in line.items() if k not in CLOCK_KEYS} for line in metrics]


def test_train_writes_a_complete_run_directory(run_file, tmp_path):
    tandem("train", run_file)
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    assert [tuple(line) for line in metrics] == [KEYS] * 4
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert [line["version/senior"] for line in metrics] == [1, 2, 3, 4]
    assert metrics[0]["policy/grad_norm"] is None  # not finite
    assert metrics[0]["loss/policy"] is None  # not reported
    records = records_of(run, 2)
    assert len(records) == 6
    assert {record["senior_versions"][0][0] for record in records} == {1}
    assert len({record["seed"] for record in records}) == 3
    assert (run / "logs" / "attempt_1.log").exists()
    assert loading.load(RunSettings, run / "config.yaml") == loading.load(RunSettings, run_file)


def test_the_same_seed_gives_the_same_run(world, run_file, tmp_path):
    tandem("train", run_file, f"run_dir={tmp_path / 'a'}")
    world.version = world.published = 0
    tandem("train", run_file, f"run_dir={tmp_path / 'b'}")
    a, b = (without_clock(lines(tmp_path / name / "metrics.jsonl")) for name in "ab")
    assert a == b
    for step in range(1, 5):
        name = f"trajectories/step_{step}.parquet"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_resumed_run_equals_an_uninterrupted_one(world, run_file, tmp_path):
    tandem("train", run_file, f"run_dir={tmp_path / 'whole'}")
    world.version = world.published = 0
    parted = f"run_dir={tmp_path / 'parted'}"
    tandem("train", run_file, parted, "steps=2")
    # A crash after the checkpoint: lines written since are removed.
    with (tmp_path / "parted" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n{"ste')
    tandem("train", run_file, parted, check=2)
    tandem("train", run_file, parted, "--resume")
    whole, both = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parted"))
    assert without_clock(whole) == without_clock(both)
    # Two of the three starts reached their first step.
    assert len(list((tmp_path / "parted" / "logs").iterdir())) == 2


def test_the_time_of_a_run_goes_on_when_it_is_resumed(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    [first] = lines(metrics)
    metrics.write_text(json.dumps(first | {"time_seconds": 1000.0}) + "\n")
    tandem("train", run_file, "steps=2", "--resume")
    assert 1000 < lines(metrics)[1]["time_seconds"] < 2000


def test_nothing_is_lost_when_a_server_is_unreachable(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    before = contents(run)
    nobody = "servers.trainer=127.0.0.1:1"
    tandem("train", run_file, "steps=3", "--clean", nobody, check=3)
    tandem("train", run_file, "steps=3", "--resume", nobody, check=3)
    assert contents(run) == before
    fresh = tmp_path / "fresh"
    tandem("train", run_file, f"run_dir={fresh}", nobody, check=3)
    assert not fresh.exists()
    tandem("train", run_file, f"run_dir={fresh}")


def test_a_resumed_run_forgets_nothing_before_its_checkpoint_is_loaded(world, run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    before = contents(run)
    saved, world.saved = world.saved, {}
    tandem("train", run_file, "--resume", check=1)
    assert contents(run) == before
    world.saved = saved
    tandem("train", run_file, "--resume")
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_stops_at_once_and_loses_nothing(
    world, run_file, tmp_path, monkeypatch, number
):
    tandem("train", run_file, "steps=1")
    before = contents(tmp_path / "run")
    waiting, done = threading.Event(), threading.Event()

    def hold(method, context):
        waiting.set()
        done.wait(60)

    monkeypatch.setattr(world, "enter", hold)
    process = subprocess.Popen([sys.executable, "-m", "tandem", "train", run_file, "--clean"])
    try:
        assert waiting.wait(60)
        process.send_signal(number)
        assert process.wait(30) == 130
    finally:
        process.kill()
        done.set()
    assert contents(tmp_path / "run") == before


def test_the_checkpoint_of_state_json_survives_the_pruning_of_the_next_save(world, run_file):
    tandem("train", run_file, "steps=1", "checkpoint.keep=1")
    tandem("train", run_file, "steps=1", "checkpoint.keep=0", "--clean")
    # The one to keep and the one that state.json still names; 0 keeps all.
    assert world.keeps == [2, 0]


def test_a_text_to_learn_that_no_server_holds_is_named_before_anything_is_written(
    world, run_file, tmp_path
):
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "w1 w2", "answer": "w3 w4 w5"}\n')
    world.max_model_len = 5
    done = tandem("sft", run_file, check=2)
    said = f"sft.response: {tmp_path}/rows.jsonl:21: prompt and response have 6 tokens"
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_resuming_a_run_that_is_done_calls_no_server(world, run_file):
    tandem("train", run_file, "steps=2")
    world.calls.clear()
    done = tandem("train", run_file, "steps=2", "--resume")
    assert "all steps are done" in done.stdout
    assert world.calls == []


def test_resume_auto_goes_on_where_there_is_something_to_go_on_with(world, run_file, tmp_path):
    tandem("train", run_file, "--resume", "auto", "steps=2")
    tandem("train", "--resume=auto", run_file, "steps=3")
    assert [header.step for header in world.headers] == [1, 2, 3]
    # A run that was cut off before its first checkpoint begins again.
    (tmp_path / "run" / "state.json").unlink()
    tandem("train", "--resume", "auto", run_file, "steps=1")
    assert [header.step for header in world.headers] == [1, 2, 3, 1]
    (tmp_path / "run" / "state.json").unlink()
    assert "kind train" in tandem("sft", run_file, "--resume", "auto", check=2).stderr


def test_a_run_saves_every_so_often_by_default(run_file, tmp_path):
    every = loading.load(RunSettings, run_file).checkpoint.every
    tandem("train", run_file, f"steps={every + 1}", "checkpoint.at_end=false")
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == every


JUDGE = """
import itertools
calls = itertools.count(1)
def reward(prompt, response, **row):
    if next(calls) > {calls}:
        raise ValueError("no more")
    return 1.0
"""


def test_a_run_that_fails_saves_the_steps_before_and_says_what_to_do(world, run_file, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE.format(calls=15))
    done = tandem("train", run_file, f"reward.function={judge}:reward", check=1)
    assert "no more" in done.stderr
    assert "in step 3: saved after step 2, --resume continues from there" in done.stderr
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == 2
    judge.write_text(JUDGE.format(calls=100))
    resume = ("train", run_file, f"reward.function={judge}:reward", "--resume")
    assert "--change inputs.reward allows it" in tandem(*resume, check=2).stderr
    tandem(*resume, "--change", "inputs.reward")
    assert [header.step for header in world.headers] == [1, 2, 3, 4]


def test_a_step_that_could_not_be_published_is_saved(world, run_file, tmp_path, monkeypatch):
    enter = world.enter

    def refuse(method, context):
        if method == "PublishWeights" and world.version == 2:
            world.failures = [fakes.error_status(3, "no")]
        enter(method, context)

    monkeypatch.setattr(world, "enter", refuse)
    done = tandem("train", run_file, check=1)
    assert "in step 2: saved after step 2" in done.stderr
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_nothing_is_saved_for_a_step_that_the_trainer_did_not_do_last(
    world, run_file, tmp_path, monkeypatch
):
    enter = world.enter

    def lose(method, context):
        if method == "TrainStep" and world.version == 2:
            world.version = 3
            world.failures = [fakes.error_status(3, "lost")]
        enter(method, context)

    monkeypatch.setattr(world, "enter", lose)
    done = tandem("train", run_file, "checkpoint.every=1", check=1)
    assert "in step 3: saved after step 2" in done.stderr
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == 2
    monkeypatch.undo()
    world.version = world.published = 0
    monkeypatch.setattr(world, "enter", lose)
    done = tandem("train", run_file, "--clean", check=1)
    assert "there is no checkpoint yet" in done.stderr
    assert "holds version 3 with digest d, not the run's version 2" in done.stderr


def test_a_dry_run_writes_nothing_and_only_asks_the_servers(world, run_file, tmp_path):
    out = tandem("train", run_file, "--dry-run", "--json").stdout
    assert json.loads(out)["derived"]["samples_per_step"] == 6
    assert not (tmp_path / "run").exists()
    assert {method for method, _ in world.calls} == {"GetServerInfo", "CheckObjective"}


def test_sft_sends_answers_with_the_end_of_sequence(world, run_file, tmp_path):
    tandem("sft", run_file, "steps=2", "sft.batch_size=5")
    assert [header.num_samples for header in world.headers] == [5, 5]
    assert world.headers[0].WhichOneof("objective") == "supervised"
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["tokens/response"] == 10


def test_sft_without_an_end_of_sequence_is_refused_before_anything_is_written(run_file, tmp_path):
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    done = tandem("sft", run_file, "steps=1", check=2)
    assert f"sft.append_eos: {tmp_path / 'model'} does not name an end" in done.stderr
    assert not (tmp_path / "run").exists()
    tandem("sft", run_file, "steps=1", "sft.append_eos=false")


OWN = ("sft.responses=senior", "sft.batch_size=5")


def test_sft_learns_what_the_senior_writes_alone(world, run_file, tmp_path, monkeypatch):
    prompts, samples = [], []
    monkeypatch.setattr(world, "on_prompt", prompts.append)
    monkeypatch.setattr(world, "on_samples", samples.extend)
    # No column of the rows is a text to learn.
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1 w2"}\n{"prompt": "w3"}\n')
    tandem("sft", run_file, *OWN, "steps=2", "speculative.method=ngram")
    assert world.headers[0].WhichOneof("objective") == "supervised"
    assert [prompt.num_samples for prompt in prompts] == [1] * 10
    assert {prompt.tandem.enabled for prompt in prompts} == {False}
    assert {prompt.speculative.method for prompt in prompts} == {2}
    # The response to one prompt is another one at another place, and in another step.
    assert len({prompt.seed for prompt in prompts}) == 10
    records = records_of(tmp_path / "run", 2)
    learnt = [list(sample.response_token_ids) for sample in samples[5:]]
    assert [record["response_token_ids"] for record in records] == learnt
    assert {record["senior_versions"][0][0] for record in records} == {1}
    assert {record["reward"] for record in records} == {None}
    line = lines(tmp_path / "run" / "metrics.jsonl")[1]
    assert line["response/length_mean"] == sum(map(len, learnt)) / 5
    assert line["rollout/replicas"] == 1
    assert line["time/generate_seconds"] > 0
    assert line["reward/mean"] is None


def test_sft_on_own_responses_that_is_resumed_equals_an_uninterrupted_one(
    world, run_file, tmp_path
):
    tandem("sft", run_file, *OWN, f"run_dir={tmp_path / 'whole'}")
    world.version = world.published = 0
    parted = f"run_dir={tmp_path / 'parted'}"
    tandem("sft", run_file, *OWN, parted, "steps=2")
    said = tandem("sft", run_file, parted, "sft.batch_size=5", "--resume", check=2).stderr
    assert "sft.responses" in said
    tandem("sft", run_file, *OWN, parted, "--resume")
    whole, both = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parted"))
    assert without_clock(whole) == without_clock(both)
    for step in range(1, 5):
        name = f"trajectories/step_{step}.parquet"
        texts = [(tmp_path / run / name).read_bytes() for run in ("whole", "parted")]
        assert texts[0] == texts[1]


def test_an_objective_reaches_the_trainer_without_defaults(world, run_file):
    tandem("train", run_file, "steps=1", "objective.normalizer=all_tokens")
    assert world.headers[0].policy.normalizer == 1
    assert not world.headers[0].policy.HasField("clip_ratio_low")


def test_the_kl_coefficient_adapts_and_a_resumed_run_goes_on_with_its_bits(
    world, run_file, tmp_path
):
    # The KL depends on the coefficient of the step.
    world.metrics_of = lambda header: {
        "policy/kl_to_ref": header.policy.kl_coefficient * 10,
        "policy/weighted_tokens": 20,
        "policy/dropped_samples": 0,
    }
    adapting = ["objective.kl_coefficient=0.2", "kl_control={target: 6.0, horizon: 17}"]
    tandem("train", run_file, *adapting, f"run_dir={tmp_path / 'whole'}")
    world.version = world.published = 0
    parted = [*adapting, f"run_dir={tmp_path / 'parted'}"]
    tandem("train", run_file, *parted, "steps=2")
    tandem("train", run_file, *parted, "--resume")
    whole, both = (
        [line["policy/kl_coefficient"] for line in lines(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parted")
    )
    assert both == whole
    assert len(set(whole)) == 4
    sent = [header.policy.kl_coefficient for header in world.headers]
    assert sent == [*whole, *whole]
    # 20 tokens of 6 responses at 2 nats are 6.67 nats each.
    assert whole[:2] == [0.2, pytest.approx(0.2 * (1 + (20 / 18 - 1) * 6 / 17))]


def test_a_kl_coefficient_without_control_is_a_constant_of_the_metrics(run_file, tmp_path):
    tandem("train", run_file, "steps=2", "objective.kl_coefficient=0.2")
    run = tmp_path / "run" / "metrics.jsonl"
    assert [line["policy/kl_coefficient"] for line in lines(run)] == [0.2, 0.2]
    tandem("train", run_file, "steps=1", "--clean")
    assert [line["policy/kl_coefficient"] for line in lines(run)] == [None]


def test_rewards_that_fail_end_the_run_or_are_left_out(world, run_file, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def reward(prompt, response, **row):\n    return 1 / (len(response) % 3)\n"
    )
    function = f"reward.function={tmp_path}/judge.py:reward"
    done = tandem("train", run_file, function, check=1)
    assert "ZeroDivisionError" in done.stderr
    assert f"row: {tmp_path}/rows.jsonl:" in done.stderr
    done = tandem("train", run_file, function, "reward.on_error=skip", "--clean")
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    failed = [line["reward/failed"] for line in metrics]
    assert 0 < sum(failed) < 24
    assert [header.num_samples for header in world.headers] == [6 - count for count in failed]
    step = 1 + next(i for i, count in enumerate(failed) if count)
    records = records_of(tmp_path / "run", step)
    assert sum(record["reward"] is None for record in records) == failed[step - 1]
    assert f"step {step}: the reward failed for {failed[step - 1]} of 6 responses" in done.stdout
    log = (tmp_path / "run" / "logs" / "attempt_2.log").read_text()
    assert log.count("ZeroDivisionError: ") >= sum(failed)


def test_several_rewards_are_added_up_and_each_is_recorded(run_file, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def length(prompt, response, **row):\n    return len(response)\n"
        "def words(prompt, response, **row):\n    return response.count('w')\n"
    )
    config = yaml.safe_load(run_file.read_text())
    config["rewards"] = [
        {"function": "judge.py:length", "weight": 0.5},
        {"function": "judge.py:words", "name": "many_words", "weight": -1.0},
    ]
    run_file.write_text(yaml.safe_dump(config))
    tandem("train", run_file, "steps=1")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    records = records_of(tmp_path / "run", 1)
    rows = {row["prompt"]: row["answer"] for row in lines(tmp_path / "rows.jsonl")}
    for record in records:
        text, scores = record["text"], record["scores"]
        assert scores == {"length": len(text), "many_words": text.count("w")}
        assert record["reward"] == 0.5 * scores["length"] - scores["many_words"]
        assert record["row"]["answer"] in rows.values()
        assert record["place"].startswith("rows.jsonl:")
    for name in ("length", "many_words"):
        mean = sum(record["scores"][name] for record in records) / len(records)
        assert line[f"reward/{name}"] == pytest.approx(mean)
    # The recorded configuration can be read again.
    assert tandem("view", tmp_path / "run", "--count", "1").stdout


def test_stop_texts_are_those_of_steps_and_evaluations(run_file, world):
    asked = []
    world.on_prompt = asked.append
    tandem("train", run_file, "steps=1", "eval.every=1", "sampling.stop=[w5 w6, '<eos>']")
    assert {tuple(prompt.sampling.stop_token_ids) for prompt in asked} == {(0,)}
    assert {tuple(prompt.sampling.stop) for prompt in asked} == {("w5 w6",)}
    assert sorted({prompt.sampling.temperature for prompt in asked}) == [0.0, 1.0]
    # A step, and an evaluation before and after it.
    assert len(asked) == 3 + 2 * 20
    long = "x" * 257
    done = tandem("train", run_file, f"sampling.stop=[{long}]", "--dry-run", check=2)
    assert "sampling.stop: " in done.stderr
    assert "has 257 bytes" in done.stderr


def test_three_steps_whose_rewards_all_fail_end_the_run(world, run_file, tmp_path):
    (tmp_path / "judge.py").write_text("def reward(prompt, response, **row):\n    return None\n")
    function = f"reward.function={tmp_path}/judge.py:reward"
    done = tandem("train", run_file, function, "reward.on_error=skip", check=1)
    said = "step 3: the reward failed for every response, as in the 2 steps before"
    assert said in done.stderr
    assert "saved after step 2" in done.stderr
    assert world.headers == []
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step/trained"], line["reward/failed"]) for line in metrics] == [(0, 6), (0, 6)]
    assert [line["reward/mean"] for line in metrics] == [None, None]


def test_a_judge_that_is_away_for_a_step_costs_that_step(world, run_file, tmp_path):
    (tmp_path / "judge.py").write_text(
        "import itertools\ncalls = itertools.count()\n"
        "def reward(prompt, response, **row):\n"
        "    if 6 <= next(calls) < 12:\n        raise ConnectionError('502')\n"
        "    return len(response) % 2\n"
    )
    function = f"reward.function={tmp_path}/judge.py:reward"
    done = tandem("train", run_file, function, "reward.on_error=skip")
    assert [header.step for header in world.headers] == [1, 3, 4]
    assert "step 2 trained nothing: no response has a reward" in done.stdout
    [shown] = [one for one in done.stdout.splitlines() if one.endswith(" trained nothing")]
    assert shown.split()[0] == "2"
    account = "3 of 4 steps trained (1 skipped: no response has a reward), responses without a "
    assert account + "reward: 6" in done.stdout


def test_runs_that_cannot_learn_are_told(run_file):
    settings = ["sampling.temperature=0", "tandem.enabled=false", "batch.samples_per_prompt=1"]
    for dry_run in (["--dry-run"], []):
        shown = tandem("train", run_file, *settings, *dry_run).stdout
        assert "warning: this run cannot learn: sampling.temperature: 0" in shown
        assert "warning: this run cannot learn: batch.samples_per_prompt: 1" in shown
    # Nothing matches the rows' answers: no reward differs.
    assert shown.count("warning: after 3 steps all responses") == 1


def test_evaluations_in_a_run_are_printed_and_are_events(run_file, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    modes = "eval.modes=[legibility, solo]"
    shown = tandem("train", run_file, "eval.every=2", modes).stdout.splitlines()
    said = [line for line in shown if line.endswith("; 20 prompts, 1 sample each")]
    starts = (
        "legibility: junior, nats/token 2.000 (95 % interval 2.000 to 2.000), senior, nats/token ",
        "solo: accuracy 0.0% (95 % interval 0.0% to 16.1%); ",
    )
    expected = [f"step {step}: {start}" for step in (0, 2, 4) for start in starts]
    assert all(line.startswith(start) for line, start in zip(said, expected, strict=True))
    written = lines(tmp_path / "run" / "evals.jsonl")
    assert [(line["step"], line["mode"], line["version/senior"]) for line in written] == [
        (step, mode, step) for step in (0, 2, 4) for mode in ("legibility", "solo")
    ]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/solo/accuracy")] == [0, 2, 4]
    tag = "eval/legibility/junior/nats_per_token"
    assert [event.value for event in events.Scalars(tag)] == [2, 2, 2]


def test_events_of_steps_that_a_resumed_run_does_again_are_forgotten(run_file, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tandem.trackers.event_file import EventFile

    tandem("train", run_file, "steps=2", "eval.every=2")
    # The events of a run that was lost in step 5, with its last checkpoint after step 2.
    folder = tmp_path / "run" / "tensorboard"
    with EventFile(folder, 3) as events:
        for step in (3, 4):
            events.add({"step": step, "loss/total": 100.0, "only/then": 1.0})
            events.add({"step": step, "accuracy": 100.0}, "eval/solo/")
    tandem("train", run_file, "--resume", "eval.every=2")
    # Reads all events in the files: not every reader drops those that a later start repeats.
    events = EventAccumulator(str(folder), purge_orphaned_data=False).Reload()
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval/solo/accuracy")] == [0, 2, 4]
    assert "only/then" not in events.Tags()["scalars"]


def test_a_prompt_that_no_server_holds_is_named_before_anything_is_written(
    world, run_file, tmp_path
):
    world.max_model_len = 2
    done = tandem("train", run_file, check=2)
    assert f"data: {tmp_path}/rows.jsonl:1: the prompt has 2 tokens" in done.stderr
    assert not (tmp_path / "run").exists()


# Rewards of every other row of the 20 may differ.
HALF = """
def reward(prompt, response, answer):
    return float(int(answer[1:]) % 2 and len(response) % 2)
"""


def test_a_run_that_filters_groups_is_resumed_at_its_place_in_the_data(world, run_file, tmp_path):
    (tmp_path / "judge.py").write_text(HALF)
    asked = [f"reward.function={tmp_path}/judge.py:reward", "batch.filter_groups={}"]
    tandem("train", run_file, *asked, f"run_dir={tmp_path / 'whole'}")
    world.version = world.published = 0
    parted = [*asked, f"run_dir={tmp_path / 'parted'}"]
    tandem("train", run_file, *parted, "steps=2")
    tandem("train", run_file, *parted, "--resume")
    whole, both = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parted"))
    assert without_clock(whole) == without_clock(both)
    drawn = [line["batch/groups_drawn"] for line in whole]
    dropped = [line["batch/groups_dropped"] for line in whole]
    assert min(dropped) > 0
    for step in range(1, 5):
        name = f"trajectories/step_{step}.parquet"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parted" / name).read_bytes()
        records = records_of(tmp_path / "whole", step)
        assert len(records) == 2 * drawn[step - 1]
    kept = [header.num_samples for header in world.headers[:4]]
    assert kept == [2 * (a - b) for a, b in zip(drawn, dropped, strict=True)]
    state = json.loads((tmp_path / "parted" / "state.json").read_text())
    assert state["examples_drawn"] == sum(drawn)


@pytest.mark.parametrize("release", ["this", "earlier"])
@pytest.mark.parametrize(("kind", "size"), [("train", 3), ("sft", 16)])
def test_a_run_is_resumed_at_its_place_in_the_data(
    world, run_file, tmp_path, monkeypatch, kind, size, release
):
    def samples_of(*arguments):
        sent.clear()
        tandem(kind, run_file, *arguments)
        return list(sent)

    sent = []
    monkeypatch.setattr(world, "on_samples", sent.extend)
    whole = samples_of(f"run_dir={tmp_path / 'whole'}")
    world.version = world.published = 0
    first = samples_of("steps=2")
    file = tmp_path / "run" / "state.json"
    state = json.loads(file.read_text())
    assert state["examples_drawn"] == 2 * size
    if release == "earlier":
        del state["examples_drawn"]
        file.write_text(json.dumps(state))
    assert first + samples_of("--resume") == whole


def test_a_step_without_a_group_to_train_on_is_skipped_and_told(world, run_file, tmp_path):
    # Nothing matches the rows' answers.
    filtering = "batch.filter_groups.max_num_gen_batches=2"
    done = tandem("train", run_file, "steps=2", filtering, check=4)
    shown = done.stdout
    account = "no step changed a weight: 0 of 2 steps trained (2 skipped: no group has rewards that"
    assert account in shown
    # A finished run stays what it is.
    again = tandem("train", run_file, "steps=2", filtering, "--resume", check=4)
    assert "no step changed a weight: 0 of 2 steps trained" in again.stdout
    said = "0 of 3 groups: the rewards of the other 6 that were drawn do not differ"
    assert [f"step {step}: {said}" in shown for step in (1, 2)] == [True, True]
    assert world.headers == []
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["version/senior"] for line in metrics] == [0, 0]
    assert [line["loss/total"] for line in metrics] == [None, None]
    assert [line["reward/frac_zero_std"] for line in metrics] == [1.0, 1.0]
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    assert "INFO step 2 trained nothing: no group has rewards that differ" in log


def test_overlong_responses_are_punished_in_training_alone(world, run_file, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(world, "on_samples", sent.extend)
    (tmp_path / "judge.py").write_text("def reward(prompt, response, **row):\n    return 1.0\n")
    tandem(
        *("train", run_file, "steps=1", "eval.every=1", "batch.samples_per_prompt=8"),
        *(f"reward.function={tmp_path}/judge.py:reward", "reward.overlong_buffer={len: 2}"),
    )
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    records = records_of(tmp_path / "run", 1)
    punished = {6: -1.0, 5: -0.5}
    expected = [punished.get(len(record["response_token_ids"]), 0.0) for record in records]
    assert min(expected) < max(expected)
    assert [record["overlong_punishment"] for record in records] == expected
    assert {record["reward"] for record in records} == {1.0}
    assert line["reward/task_mean"] == 1.0
    assert line["reward/overlong_mean"] == pytest.approx(sum(expected) / len(expected))
    assert (line["reward/min"], line["reward/max"]) == (0.0, 1.0)
    assert [sample.reward for sample in sent] == [1.0 + one for one in expected]
    [_, evaluation] = lines(tmp_path / "run" / "evals.jsonl")
    assert evaluation["reward/mean"] == 1.0


def test_a_buffer_longer_than_any_response_is_refused(run_file):
    done = tandem("train", run_file, "reward.overlong_buffer={len: 7}", check=2)
    assert "reward.overlong_buffer.len: 7 tokens, but sampling.max_tokens allows" in done.stderr


def test_responses_are_judged_while_others_are_drawn(world, run_file, tmp_path):
    (tmp_path / "judge.py").write_text(
        "from pathlib import Path\n"
        "def reward(prompt, response, **row):\n"
        f"    Path({str(tmp_path / 'judged')!r}).touch()\n    return len(response) % 2\n"
    )
    prompts = itertools.count(1)

    def hold_the_last(prompt):
        if next(prompts) == 3:
            fakes.wait_until((tmp_path / "judged").exists)

    world.on_prompt = hold_the_last
    tandem("train", run_file, "steps=1", f"reward.function={tmp_path}/judge.py:reward")
    assert (tmp_path / "judged").exists()


CHANGES = """
def reward(prompt, response, answer, **row):
    seen = len(row["tags"])
    row["tags"].append(response)
    row["info"].pop("target")
    return float(seen + len(response) % 3)
"""


def test_what_a_judge_does_to_its_row_reaches_nothing_in_any_way_to_call_it(
    world, run_file, tmp_path
):
    (tmp_path / "judge.py").write_text(CHANGES)
    rows = [
        {"prompt": f"w{i} w{i + 1}", "answer": f"w{i}", "tags": ["a"], "info": {"target": 1}}
        for i in range(2, 6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = f"reward.function={tmp_path}/judge.py:reward"
    left = []
    for name, *options in (
        ("threads",),
        ("one", "reward.workers=1"),
        ("processes", "reward.executor=process", "reward.workers=2"),
        ("resumed", "steps=1"),
    ):
        world.version = world.published = 0
        run = f"run_dir={tmp_path / name}"
        tandem("train", run_file, judge, run, *options)
        if name == "resumed":
            tandem("train", run_file, judge, run, "--resume")
        records = tandem("view", tmp_path / name, "--json").stdout.splitlines()
        left.append((without_clock(lines(tmp_path / name / "metrics.jsonl")), records))
        assert '"tags": ["a"]' in records[0]
    assert left == [left[0]] * 4
