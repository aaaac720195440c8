"""Environments that ask the junior, for an opponent's move for example."""

import json
import time

import fakes
import pytest
from commands import lines, records, tandem
from guess_game import crash_in_the_second_step, guessing, resume, train
from talking import let_write

# The opponent is told what was guessed, and what it says is told to the models.
DUEL = '''
class Guess:
    def reset(self, answer, junior, **row):
        self.answer, self.junior, self.done, self.heard = answer, junior, False, []
        return " " + junior([{"role": "user", "content": f"Begin {answer}."}])

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: the number.
        """
        self.heard.append(str(number))
        said = self.junior(
            [{"role": "user", "content": " ".join(self.heard)}], max_tokens=20, temperature=0.5
        )
        self.done = len(self.heard) == 3
        return said

    def get_reward(self):
        return len(self.heard)
'''


@pytest.fixture
def duel(run_file, tmp_path):
    """A run whose environment asks the junior."""
    (tmp_path / "env.py").write_text(DUEL)
    rows = [{"prompt": f"Guess {i}.", "answer": i} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_file


def is_question(prompt):
    return prompt.tandem.HasField("prob_senior") and prompt.tandem.prob_senior == 0


def play(world, codec, on_question=lambda prompt: None):
    """The models guess; the junior says "mine", and the number of its token."""
    let_write(world, codec, guessing)
    write = world.sample
    asked = []

    def sample(prompt, index, version):
        if not is_question(prompt):
            return write(prompt, index, version)
        asked.append(prompt)
        on_question(prompt)
        text = f"mine {prompt.seed % 97}<|im_end|>"
        return fakes.written(prompt, index, version, codec.encode(text, special=False))

    world.sample = sample
    return asked


def test_the_juniors_answers_are_words_of_the_environment(world, codec, duel, tmp_path):
    asked = play(world, codec)
    train(duel, "steps=1", "environment.junior=true", "tandem.enabled=false")
    episodes = records(tmp_path / "run", 1)
    assert len(episodes) == 6
    for one in episodes:
        assert " mine " in "".join(codec.token_texts(one["prompt_token_ids"]))
        # The junior's words are in the response as the environment's; it is the author of no token.
        assert set(one["authorship_mask"]) == {1, 2}
        assert one["text"].count("<tool_response>mine ") == 2
    questions = ["".join(codec.token_texts(one.prompt_token_ids)) for one in asked]
    assert len(questions) == 6 * 4
    # They are written as the run's prompts are, with the tools.
    assert all(one.startswith("<|im_start|>system\nguess ") for one in questions)
    assert {one.sampling.temperature for one in asked} == {1.0, 0.5}
    assert {one.sampling.max_tokens for one in asked} == {200, 20}
    assert all(codec.special_token_id("<|im_end|>") in one.sampling.stop_token_ids for one in asked)


def test_an_environment_in_a_process_asks_as_one_in_a_thread(world, codec, duel, tmp_path):
    rows = [{"prompt": "Guess.", "answer": answer} for answer in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # A question that has no room is the environment's failure.
    text = DUEL.replace('" ".join(self.heard)', '"x" * 3000 if self.answer == 1 else "y"')
    (tmp_path / "env.py").write_text(text)
    asked = play(world, codec)
    questions, failures = [], []
    for executor in ("thread", "process"):
        world.version = world.published = 0
        asked.clear()
        given = ["environment.junior=true", f"environment.executor={executor}"]
        train(duel, "steps=1", *given, f"run_dir={tmp_path / executor}")
        questions.append(sorted((one.seed, list(one.prompt_token_ids)) for one in asked))
        [line] = lines(tmp_path / executor / "metrics.jsonl")
        failures.append(line["environment/failures"])
    assert questions[0] == questions[1]
    assert failures == [2, 2]
    name = "trajectories/step_1.parquet"
    assert (tmp_path / "thread" / name).read_bytes() == (tmp_path / "process" / name).read_bytes()


def test_too_long_a_question_costs_the_episode(world, codec, duel, tmp_path):
    rows = [{"prompt": "Guess.", "answer": answer} for answer in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "env.py").write_text(
        DUEL.replace('" ".join(self.heard)', '"x" * (self.answer << 21)')
    )
    play(world, codec)
    train(duel, "steps=1", "environment.junior=true", "environment.executor=process")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["environment/floods"] == line["environment/failures"] == 4


def test_equal_episodes_ask_with_equal_seeds_and_other_questions_with_others(world, codec, duel):
    asked = play(world, codec)
    train(duel, "steps=1", "environment.junior=true")
    begun = [one for one in asked if one.sampling.max_tokens == 200]
    texts = {}
    for one in begun:
        texts.setdefault(bytes(str(list(one.prompt_token_ids)), "ascii"), set()).add(one.seed)
    # The two samples of a prompt begin alike.
    assert [len(seeds) for seeds in texts.values()] == [1, 1, 1]
    assert len({one.seed for one in asked}) == 3 * 4


def test_a_resumed_run_does_not_ask_again(world, codec, duel):
    asked = play(world, codec)
    run = crash_in_the_second_step(duel, "environment.junior=true")
    first = (run / "trajectories/step_2.parquet").read_bytes()
    number = len(asked)
    resume(duel, "environment.junior=true")
    assert (run / "trajectories/step_2.parquet").read_bytes() == first
    assert len(asked) == number


def test_evaluations_ask_the_junior(world, codec, duel):
    asked = play(world, codec)
    printed = tandem("eval", duel, "--json", "environment.junior=true", "tandem.enabled=false")
    said = json.loads(printed.stdout.splitlines()[-1])["evaluations"]["solo"]
    assert said["prompts"] == 12
    assert len(asked) == 12 * 4


def test_messages_that_have_no_room_cost_the_episode(world, codec, duel, tmp_path):
    play(world, codec)
    rows = [{"prompt": "Guess.", "answer": answer} for answer in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = DUEL.replace('" ".join(self.heard)', '"x" * 3000 if self.answer == 1 else "y"')
    (tmp_path / "env.py").write_text(text)
    train(duel, "steps=1", "environment.junior=true")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["environment/failures"] == 2
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    assert "junior: the messages have 3," in log
    assert "but the servers' max_model_len is 2,048" in log


def test_a_class_that_asks_needs_the_setting_and_a_junior(world, codec, duel, tmp_path):
    play(world, codec)
    refused = train(duel, check=2)
    assert "missing a required argument: 'junior'" in refused.stderr
    assert "environment.junior: true" in refused.stderr
    world.has_junior = False
    refused = train(duel, "environment.junior=true", "tandem.enabled=false", check=2)
    assert "environment.junior: the rollout server at" in refused.stderr
    assert "has no junior" in refused.stderr


def test_a_failing_server_ends_the_run_and_not_only_its_questions(world, codec, duel, tmp_path):
    def fail(prompt):
        raise RuntimeError("out of memory")

    play(world, codec, fail)
    train(duel, "steps=1", "environment.junior=true", "servers.retry_seconds=0", check=1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(
        tmp_path / "run" / "metrics.jsonl"
    )


def test_a_question_that_takes_too_long_costs_its_own_episode(world, codec, duel, tmp_path):
    slow = []

    def wait(prompt):
        if prompt.sampling.max_tokens == 20 and not slow:
            slow.append(prompt)
            time.sleep(1.5)

    play(world, codec, wait)
    train(duel, "steps=1", "environment.junior=true", "environment.timeout_seconds=0.5")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["environment/timeouts"] >= 1
    assert line["environment/stop_environment"] >= 1
    assert line["environment/failures"] == line["environment/timeouts"]
