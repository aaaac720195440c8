"""Runs with an environment against fake servers, through the command line."""

import json
import signal
import threading

import fake_fleet
import fakes
import pytest
import yaml
from commands import contents, lines, tandem
from commands import records as records_of
from fake_fleet import FakeReplica, random_delay
from guess_game import (
    ENVIRONMENT,
    crash_in_the_second_step,
    guessing,
    resume,
    train,
    train_in_trouble,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from talking import TEMPLATE, called, let_write

from tandem import tracing
from tandem.metrics import CLOCK_KEYS, ENVIRONMENT_KEYS, KEYS
from tandem.run_directory.trajectories.files import evaluation_file, read_records
from tandem.utils.authors import turns


def without_clock(metrics):
    return [{k: v for k, v in line.items() if k not in CLOCK_KEYS} for line in metrics]


def test_episodes_are_trained_recorded_and_counted(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    trained = []
    world.on_samples = trained.extend
    train(run_file)
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    assert tuple(metrics[0]) == KEYS + ENVIRONMENT_KEYS
    assert len(trained) == 12
    for one in trained:
        trajectory = one.trajectory
        assert trajectory.response_offset == 0
        text = "".join(codec.token_texts(trajectory.response_token_ids))
        assert text.endswith("</tool_call><|im_end|>")
        mask = trajectory.authorship_mask
        said = "".join(
            codec.token_texts(
                [t for t, a in zip(trajectory.response_token_ids, mask, strict=True) if a == 2]
            )
        )
        assert said.count("<tool_response>") == turns(mask) - 1
        # The environment ended the episode with the right guess, and its reward is by the tries.
        assert one.reward == 1 / turns(mask)
        prompt = "".join(codec.token_texts(trajectory.prompt_token_ids))
        assert "fail guess hint think" in prompt
        assert " Begin.<|im_end|>" in prompt
    records = [one for step in (1, 2) for one in records_of(run, step)]
    assert [turns(one["authorship_mask"]) for one in records] == [
        turns(one.trajectory.authorship_mask) for one in trained
    ]
    line = metrics[0]
    of_step = records[:6]
    mean = sum(turns(one["authorship_mask"]) for one in of_step) / 6
    assert line["environment/turns_mean"] == line["environment/tool_calls_mean"] == mean
    assert line["environment/stop_environment"] == 6
    assert sum(line[key] for key in ENVIRONMENT_KEYS if "stop_" in key) == 6
    assert (line["environment/failures"], line["environment/timeouts"]) == (0, 0)
    assert line["environment/tokens_mean"] * 6 == sum(
        one["authorship_mask"].count(2) for one in of_step
    )
    assert line["response/length_mean"] * 6 == sum(
        len(one["authorship_mask"]) - one["authorship_mask"].count(2) for one in of_step
    )


def test_the_same_seed_gives_the_same_run(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    for name in "ab":
        world.version = world.published = 0
        train(run_file, f"run_dir={tmp_path / name}")
    a, b = (without_clock(lines(tmp_path / name / "metrics.jsonl")) for name in "ab")
    assert a == b
    for step in (1, 2):
        name = f"trajectories/step_{step}.parquet"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


# Nothing that it says is said twice.
RANDOM = ENVIRONMENT.replace("self.done", "self.found").replace(
    'return "right"', 'import os\n        return os.urandom(4).hex() + " right"'
)


@pytest.fixture
def crashed(world, codec, run_file, tmp_path):
    """A run of two steps with a random environment, of which only the first one is saved."""
    (tmp_path / "env.py").write_text(RANDOM)
    let_write(world, codec, lambda *asked: "Bye." if "right" in asked[2] else guessing(*asked))
    return crash_in_the_second_step(run_file)


def test_a_step_that_is_drawn_again_gets_the_same_answers_from_the_record(crashed, run_file):
    first = contents(crashed)
    resume(run_file)
    again = contents(crashed)
    name = "trajectories/step_2.parquet"
    assert again[name] == first[name]
    # Nothing was asked again.
    name = "episodes/step_2.jsonl"
    assert sorted(again[name].splitlines()) == sorted(first[name].splitlines())


def test_an_episode_that_was_cut_off_begins_anew(crashed, run_file):
    file = crashed / "episodes" / "step_2.jsonl"
    whole = file.read_text().splitlines()
    ended = [json.loads(line) for line in whole if '"end"' in line]
    assert len(ended) == 6
    # Only the first episode that ended is whole, and a line is cut in two.
    kept = [one for one in whole if '"end"' not in one]
    file.write_text("\n".join([*kept, json.dumps(ended[0]), whole[0][:20]]))
    before = records_of(crashed, 2)
    resume(run_file)
    again = records_of(crashed, 2)
    same = [one["text"] == two["text"] for one, two in zip(before, again, strict=True)]
    place = ended[0]["prompt"] * 2 + ended[0]["sample"]
    assert same == [index == place for index in range(6)]
    assert file.read_text().count('"end"') == 6
    assert file.read_text().endswith("}\n")


def test_a_record_of_what_the_models_do_not_write_any_more_is_dropped(
    crashed, run_file, world, codec
):
    before = records_of(crashed, 2)
    let_write(world, codec, lambda *asked: "!" + guessing(*asked))
    resume(run_file)
    again = records_of(crashed, 2)
    assert all(one["text"] != two["text"] for one, two in zip(before, again, strict=True))
    assert all("!I guess." in one["text"] for one in again)
    # The next start replays the new episodes.
    kept = contents(crashed)["episodes/step_2.jsonl"]
    state = json.loads((crashed / "state.json").read_text())
    assert state["step"] == 1
    resume(run_file)
    assert [one["text"] for one in records_of(crashed, 2)] == [one["text"] for one in again]
    assert len(contents(crashed)["episodes/step_2.jsonl"]) < len(kept)


@pytest.mark.parametrize(
    ("write", "settings", "reason", "turns_mean"),
    [
        (lambda *_: "No call.", {}, "finished", 1),
        (lambda *_: called("guess", number=9), {"max_turns": 3}, "turns", 3),
        (lambda *_: called("guess", number=9), {"max_tool_calls": 2}, "tool_calls", 3),
        (lambda *_: "<tool_call>{</tool_call>", {"max_parse_errors": 2}, "parse_error", 2),
        (lambda *_: called("guess", number=9) + " " * 200, {}, "tokens", 1),
        (lambda *_: called("guess", number=9), {"max_episode_tokens": 100}, "tokens", 1),
        (lambda *_: called("guess", number=9), {"max_episode_tokens": 150}, "tokens", 2),
        (
            lambda *_: called("think", seconds=1),
            {"episode_timeout_seconds": 1.5},
            "time",
            2,
        ),
    ],
)
def test_episodes_end_for_the_reason_that_is_counted(
    world, codec, run_file, tmp_path, write, settings, reason, turns_mean
):
    let_write(world, codec, write)
    given = [f"environment.{name}={value}" for name, value in settings.items()]
    train(run_file, "steps=1", *given)
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line[f"environment/stop_{reason}"] == 6
    assert line["environment/turns_mean"] == turns_mean
    for one in records_of(tmp_path / "run", 1):
        assert one["authorship_mask"][-1] != 2


@pytest.mark.parametrize("rewards", [True, False])
def test_the_context_ends_an_episode(world, codec, run_file, tmp_path, rewards):
    let_write(world, codec, lambda *_: called("guess", number=9))
    if not rewards:
        (tmp_path / "reward.py").write_text(REWARD)
        (tmp_path / "env.py").write_text(ENVIRONMENT.replace("get_reward", "_get_reward"))
        settings = yaml.safe_load(run_file.read_text())
        settings["reward"] = {"function": "reward.py:reward"}
        run_file.write_text(yaml.safe_dump(settings))
    world.max_model_len = world.junior_max_model_len = 400
    train(run_file, "steps=1", "environment.max_turns=50")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["environment/stop_context"] == 6
    for one in records_of(tmp_path / "run", 1):
        assert len(one["prompt_token_ids"]) + len(one["response_token_ids"]) <= 400


def test_what_goes_wrong_in_a_call_is_told_to_the_model_and_counted(
    world, codec, run_file, tmp_path
):
    texts = [
        "<tool_call>{bad</tool_call>",
        called("fail"),
        called("nothing"),
        called("guess", digit=1),
        called("hint"),
    ]

    def write(seed, index, before):
        place = before.count("<tool_response>")
        return texts[place] if place < len(texts) else "Bye."

    let_write(world, codec, write)
    train(run_file, "steps=1")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["environment/parse_errors"] == 6
    assert line["environment/tool_errors"] == 3 * 6
    assert line["environment/tool_calls_mean"] == 4
    assert line["environment/stop_finished"] == 6
    text = records_of(tmp_path / "run", 1)[0]["text"]
    for said in (
        "Error: the call is not JSON",
        "Error: ValueError: out of order",
        "Error: unknown tool 'nothing'; the tools are fail, guess, hint, think",
        "Error: TypeError: Guess.guess() got an unexpected keyword argument 'digit'",
        "it is ",
    ):
        assert f"<tool_response>{said}" in text


def test_an_environment_that_hangs_or_fails_costs_its_own_episodes(
    world, codec, run_file, tmp_path
):
    rows = [{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": 0, "breaks": "reset"}]
    rows.append({"prompt": "c", "answer": 0, "breaks": ""})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = []
    world.on_samples = trained.extend

    def write(seed, index, before):
        return called("think", seconds=30) if index else guessing(seed, index, before)

    let_write(world, codec, write)
    train(run_file, "steps=1", "environment.timeout_seconds=0.5")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    # Both samples of the row whose reset() fails, and the second of both others.
    assert line["environment/failures"] == 4
    assert line["environment/timeouts"] == line["environment/stop_time"] == 2
    assert line["reward/failed"] == 2
    records = records_of(tmp_path / "run", 1)
    assert [one["reward"] is None for one in records] == [False, True, False, True]
    assert [one.trajectory.sample_index for one in trained] == [0, 0]
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    assert "RuntimeError: no connection" in log


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_every_call_of_an_environment_is_a_span_of_its_step(
    world, codec, run_file, tmp_path, monkeypatch, executor
):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_chosen", [])
    tracing.use(provider)
    let_write(world, codec, guessing)
    train(run_file, "steps=1", f"environment.executor={executor}")
    spans = exporter.get_finished_spans()
    [generate] = [one for one in spans if one.name == "generate"]
    calls = [one for one in spans if one.name == "environment"]
    assert {one.parent.span_id for one in calls} == {generate.context.span_id}
    names = ("prompt", "sample", "turn", "call")
    made = [[one.attributes[f"tandem.{name}"] for name in names] for one in calls]
    record = (tmp_path / "run" / "episodes" / "step_1.jsonl").read_text().splitlines()
    told = [[line.get(name) for name in names] for line in map(json.loads, record)]
    assert sorted(made) == sorted(line for line in told if line[-1] is not None)


def test_a_slow_environment_holds_nothing_else_up(world, codec, run_file, tmp_path):
    """The other episodes end while one waits in its first call."""
    others_done = threading.Event()
    let_write(world, codec, guessing)
    slow = ENVIRONMENT.replace(
        "        self.tries += 1\n",
        "        self.tries += 1\n"
        "        while self.slow and not Path(self.slow).exists():\n"
        "            time.sleep(0.01)\n",
    ).replace(
        "self.done = answer, 0, False",
        "self.done = answer, 0, False\n        self.slow = row.get('slow')",
    )
    (tmp_path / "env.py").write_text(slow)
    flag = tmp_path / "go"
    rows = [{"prompt": str(i), "answer": 1, "slow": ""} for i in range(3)]
    rows[0]["slow"] = str(flag)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    episodes = tmp_path / "run" / "episodes" / "step_1.jsonl"

    def release():
        fakes.wait_until(lambda: episodes.exists() and episodes.read_text().count('"end"') == 4)
        others_done.set()
        flag.write_text("")

    thread = threading.Thread(target=release)
    thread.start()
    train(run_file, "steps=1")
    thread.join()
    assert others_done.is_set()
    assert len(records_of(tmp_path / "run", 1)) == 6


REWARD = "def reward(prompt, response, **row):\n    return len(response) / 1000\n"


def test_rewards_of_environment_and_function_are_summed(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    (tmp_path / "reward.py").write_text(REWARD)
    train(run_file, "steps=1", f"reward.function={tmp_path}/reward.py:reward")
    for one in records_of(tmp_path / "run", 1):
        assert set(one["scores"]) == {"reward", "environment"}
        assert one["reward"] == pytest.approx(sum(one["scores"].values()))
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["reward/environment"] > 0


def test_the_reward_of_an_environment_may_have_a_weight(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    train(run_file, "steps=1", "rewards=[{function: environment, weight: 2.0, name: game}]")
    for one in records_of(tmp_path / "run", 1):
        assert one["reward"] == 2 * one["scores"]["game"] > 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.template=raw"], "environment: rows.jsonl"),
        (
            ["environment=null", "reward.function=none", "tandem.selection_strategy=turn"],
            "tandem.selection_strategy: turn needs the section `environment`",
        ),
        (
            [
                "environment=null",
                "reward.function=none",
                "eval.every=1",
                "eval.modes=[handoff]",
                "eval.handoff_turns=true",
            ],
            "eval.handoff_turns: there are turns with `environment` alone",
        ),
        (
            ["eval.every=1", "eval.modes=[tandem]", "tandem.enabled=false"],
            "eval.modes: tandem: tandem.enabled is false",
        ),
        (["environment.class=nowhere.py:Guess"], "environment.class: "),
        (["environment.max_turns=0"], "environment.max_turns: must be at least 1"),
        (["environment.class=null"], "environment: either `class` or `openenv` names"),
        (
            ["environment.openenv.url=http://127.0.0.1:1"],
            "environment: either `class` or `openenv` names",
        ),
        (
            ["environment={openenv: {url: 'http://127.0.0.1:1'}, junior: true}"],
            "environment: junior: only applies to a `class`",
        ),
        (["environment={openenv: {url: '127.0.0.1:1'}}"], "environment.openenv.url: "),
        (["reward.overlong_buffer={len: 2}"], "reward.overlong_buffer: does not apply"),
        (["environment=null", "reward.function=environment"], "needs the section `environment`"),
    ],
)
def test_what_does_not_fit_is_said_before_the_first_second(
    world, codec, run_file, tmp_path, overrides, says
):
    printed = train(run_file, *overrides, check=2)
    assert says in (printed.stderr + printed.stdout).replace(f"{tmp_path}/", "")
    assert not world.batches
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        # A turn loses a mark once another one follows.
        (
            "{{ m.content }}{% for",
            "{% if loop.last and m.role == 'assistant' %}…{% endif %}{{ m.content }}{% for",
            "cannot be continued turn by turn: a turn of the model is rendered otherwise",
        ),
        ("<tool_call>", "<call>", "environment.tool_calls: the chat template names no format"),
        (
            "<tool_call>",
            "<tool_call><arg_key>",
            "environment.tool_calls: the chat template has calls as GLM writes them",
        ),
    ],
)
def test_a_chat_template_that_does_not_fit_is_said_before_the_first_second(
    world, codec, run_file, tmp_path, old, new, says
):
    template = codec.directory / "chat_template.jinja"
    template.write_text(TEMPLATE.replace(old, new))
    for option in ([], ["--dry-run"]):
        printed = train(run_file, *option, check=2)
        assert says in " ".join((printed.stderr + printed.stdout).split())
    assert not world.batches
    assert not (tmp_path / "run").exists()


def test_an_environment_without_a_reward_needs_a_function(world, codec, run_file, tmp_path):
    (tmp_path / "env.py").write_text(ENVIRONMENT.replace("get_reward", "_get_reward"))
    let_write(world, codec, guessing)
    assert "has no get_reward()" in train(run_file, check=2).stderr
    (tmp_path / "reward.py").write_text(REWARD)
    train(run_file, "steps=1", f"reward.function={tmp_path}/reward.py:reward")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["reward/max"] > 0


def test_every_environment_is_closed_before_a_run_ends(world, codec, run_file, tmp_path):
    (tmp_path / "env.py").write_text(
        ENVIRONMENT
        + f"""
    def close(self):
        time.sleep(0.1)
        with open({str(tmp_path / "closed")!r}, "a") as file:
            file.write("x")
        raise OSError("the door is stuck")
"""
    )
    let_write(world, codec, guessing)
    train(run_file, "steps=1", "environment.workers=2")
    assert (tmp_path / "closed").read_text() == "x" * 6
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    assert "close() of an environment failed: OSError: the door is stuck" in log


def test_a_run_that_is_asked_to_stop_does_not_wait_for_an_environment(
    world, codec, run_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("tandem.environments.driver.STOP_SECONDS", 0.2)
    let_write(
        world,
        codec,
        lambda seed, index, before: (
            called("think", seconds=30) if world.version else guessing(seed, index, before)
        ),
    )
    episodes = tmp_path / "run" / "episodes" / "step_2.jsonl"

    def interrupt():
        fakes.wait_until(lambda: episodes.exists() and episodes.read_text().count("reset") == 6)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    printed = train(run_file, check=130)
    thread.join()
    assert "step 2 is given up: 6 episodes wait for their environments" in printed.stdout
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == 1


def test_evaluations_draw_solo_episodes(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    asked = []
    world.on_prompt = asked.append
    train(run_file, "steps=1", "eval.at_end=true", "eval.samples=2", "reward.correct_at=0.5")
    [line] = lines(tmp_path / "run" / "evals.jsonl")
    assert (line["mode"], line["prompts"], line["samples"]) == ("solo", 12, 2)
    answers = read_records(evaluation_file(tmp_path / "run", 1, "solo"))
    assert len(answers) == 24
    assert all(set(one["authorship_mask"]) <= {1, 2} for one in answers)
    assert line["accuracy"] == sum(one["reward"] >= 0.5 for one in answers) / 24
    assert line["environment/turns_mean"] == pytest.approx(
        sum(turns(one["authorship_mask"]) for one in answers) / 24
    )
    # Evaluations are drawn with seeds of their own, and recorded as answers alone.
    assert not (tmp_path / "run" / "episodes" / "step_0.jsonl").exists()
    before = len(asked)
    printed = tandem("eval", run_file, "--json", "eval.samples=2", "reward.correct_at=0.5")
    said = json.loads(printed.stdout.splitlines()[-1])
    assert len(asked) > before
    assert said["evaluations"]["solo"]["accuracy"] == line["accuracy"]


def test_episodes_that_cannot_begin_are_not_correct(world, codec, run_file, tmp_path):
    rows = [{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": 0, "breaks": "reset"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    let_write(world, codec, lambda seed, index, before: called("guess", number=0))
    printed = tandem("eval", run_file, "--json")
    said = json.loads(printed.stdout.splitlines()[-1])["evaluations"]["solo"]
    assert (said["accuracy"], said["environment/failures"]) == (0.5, 1)
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[1]) + "\n")
    assert "no episode of the evaluation began" in tandem("eval", run_file, check=1).stderr


def authors_of(prompt):
    """The models that write a prompt's tokens, by its fields of TandemConfig."""
    if not prompt.tandem.enabled:
        return {1}
    return {0} if prompt.tandem.prob_senior == 0 else {0, 1}


def test_evaluations_draw_episodes_of_every_author(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    asked = []
    world.on_prompt = asked.append
    modes = ["solo", "junior_solo", "tandem", "handoff"]
    boundary = "eval.handoff_boundary=s"
    given = ["--json", f"eval.modes=[{', '.join(modes)}]", boundary, "reward.correct_at=0.5"]
    printed = tandem("eval", run_file, *given, "--answers", tmp_path / "answers")
    found = json.loads(printed.stdout.splitlines()[-1])["evaluations"]
    assert list(found) == modes
    for mode in modes:
        answers = read_records(tmp_path / "answers" / f"{mode}.parquet")
        assert found[mode]["accuracy"] == sum(one["reward"] >= 0.5 for one in answers) / 12
        assert found[mode]["environment/turns_mean"] == pytest.approx(
            sum(turns(one["authorship_mask"]) for one in answers) / 12
        )
    # Each mode's models write all turns, the later ones too.
    drawn = [authors_of(one) for one in asked]
    assert [drawn.count(one) > 12 for one in ({1}, {0}, {0, 1})] == [True] * 3


def test_the_gate_compares_episodes_by_author(world, codec, run_file, tmp_path):
    rows = [{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": 0, "breaks": "reset"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    let_write(world, codec, guessing)
    printed = tandem("eval", run_file, "--gate", "--json", "eval.patterns={right: right}")
    gate = json.loads(printed.stdout.splitlines()[-1])
    assert set(gate["authors"]) == {"senior", "junior", "both"}
    # The samples of the row whose reset() fails are left out.
    assert [one["answers"] for one in gate["authors"].values()] == [2, 2, 2]
    # "I guess. " and the call in each turn; what the environment says is nobody's.
    turn = len(codec.encode("I guess. " + called("guess", number=0) + "<|im_end|>", special=False))
    assert gate["authors"]["senior"]["tokens"] % (turn / 2) == 0


def test_supervised_training_shows_the_tools_in_its_prompts(world, codec, run_file, tmp_path):
    trained = []
    world.on_samples = trained.extend
    tandem("sft", run_file, "steps=1", "sft.batch_size=2")
    for one in trained:
        assert "fail guess hint think" in "".join(codec.token_texts(one.prompt_token_ids))


@pytest.mark.parametrize("losses", [[], [5]])
def test_episodes_are_the_same_on_several_replicas(world, codec, run_file, tmp_path, losses):
    let_write(world, codec, guessing)
    train(run_file, f"run_dir={tmp_path / 'alone'}")
    world.version = world.published = 0
    replicas = [FakeReplica(world) for _ in range(3)]
    for seed, replica in enumerate(replicas):
        replica.delay = random_delay(seed, 0.004)
    replicas[0].losses, replicas[0].down_seconds = losses, 0.05
    with fake_fleet.serve(replicas) as trainer:
        addresses = ", ".join(one.address for one in replicas)
        servers = [f"servers.trainer={trainer}", f"servers.rollout=[{addresses}]"]
        train(run_file, f"run_dir={tmp_path / 'several'}", *servers)
    assert sum(bool(one.drawn) for one in replicas) > 1
    for step in (1, 2):
        name = f"trajectories/step_{step}.parquet"
        alone, several = (tmp_path / run / name for run in ("alone", "several"))
        assert several.read_bytes() == alone.read_bytes()


# An environment that hangs in a call, fails in one, or says too much, as its row has it.
TROUBLED = (
    ENVIRONMENT.replace(
        "        self.tries += 1\n",
        """        self.tries += 1
        if self.trouble == "hangs":
            threading.Event().wait(60)
        if self.trouble == "crashes":
            raise EnvironmentFailedError("the simulator is gone")
        if self.trouble == "floods":
            return "x" * (1 << 26)
""",
    )
    .replace(
        "self.done = answer, 0, False",
        "self.done = answer, 0, False\n        self.trouble = row.get('trouble')",
    )
    .replace("import time", "import threading, time\nfrom tandem import EnvironmentFailedError")
)


def test_of_64_environments_three_in_trouble_cost_their_own_episodes(
    world, codec, run_file, tmp_path
):
    (tmp_path / "env.py").write_text(TROUBLED)
    troubles = {7: "hangs", 21: "crashes", 40: "floods"}
    limit = "environment.timeout_seconds=1"
    line = train_in_trouble(world, codec, run_file, troubles, limit)
    assert (line["environment/failures"], line["environment/timeouts"]) == (3, 1)
    assert line["environment/stop_time"] == 1
    assert line["reward/failed"] == 3
    assert line["trained"] == 61
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    for message in (
        "no answer within 1 s (timeout_seconds)",
        "EnvironmentFailedError: the simulator is gone",
        "guess() said 67,108,864 characters, at most 1,048,576",
    ):
        assert message in log


COUNTED = ENVIRONMENT.replace(
    '        if row.get("breaks") == "reset":',
    '        COUNT.append(1)\n        MOST.append(sum(COUNT))\n        if row.get("breaks"):',
).replace("class Guess:", "COUNT, MOST = [], []\n\nclass Guess:") + (
    "\n    def close(self):\n        Path({place!r}).write_text(str(max(MOST)))\n"
)


@pytest.mark.parametrize("most", [1, 4])
def test_no_more_episodes_than_allowed_are_under_way(world, codec, run_file, tmp_path, most):
    (tmp_path / "env.py").write_text(
        COUNTED.replace("{place!r}", repr(str(tmp_path / "most"))).replace(
            "    def get_reward(self):\n",
            "    def get_reward(self):\n        COUNT.append(-1)\n",
        )
    )
    let_write(world, codec, guessing)
    train(run_file, "steps=1", "environment.workers=6")
    assert int((tmp_path / "most").read_text()) > most
    world.version = world.published = 0
    bound = f"environment.concurrent_episodes={most}"
    train(run_file, "steps=1", "environment.workers=6", bound, f"run_dir={tmp_path / 'bound'}")
    assert int((tmp_path / "most").read_text()) <= most
    first, second = (
        (tmp_path / run / "trajectories/step_1.parquet").read_bytes() for run in ("run", "bound")
    )
    assert first == second
