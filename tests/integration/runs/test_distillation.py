"""Students learn from teachers: rollout servers, the junior, and a model of the trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import yaml
from commands import tandem
from tandem.cluster.local import LocalCluster
from tandem.errors import ConfigError, FailedPreconditionError
from tandem.run_directory.directory import RunDirectory, RunDirectoryError
from tandem.session.opening import open_session
from tandem.settings.run import RunSettings
from tandem.training.loop import train_supervised

PAGE = (harness.REPOSITORY / "docs/guides/losses/distillation.md").read_text()
# The keys of a distillation's metrics that tell the loss and the tokens of a step.
KEYS = ("loss/distillation", "distillation/divergence", "policy/grad_norm", "loss/total")
DISTILLATION = {"distillation": {"coefficient": 1.0, "top_k": 64}}
SENIOR_ALONE = {"enabled": False}


@pytest.fixture(scope="module")
def teacher(
    models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A rollout server whose senior has the junior's weights: the teacher of these runs."""
    alone = {"senior_model": str(models.junior), "junior_model": ""}
    with harness.cluster(tmp_path_factory.mktemp("teacher"), models, rollout=alone) as running:
        yield running


@pytest.fixture(scope="module")
def student(
    models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """The servers of the student; the trainer has the teacher, too."""
    trainer = {"teacher_model": str(models.junior), "optimizer": {"learning_rate": 0.01}}
    with harness.cluster(tmp_path_factory.mktemp("student"), models, trainer=trainer) as running:
        yield running


def distil(
    student: LocalCluster,
    models: harness.Models,
    directory: Path,
    teachers: dict[str, str],
    objective: dict[str, Any] | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Lines of metrics of a run that distils."""
    return harness.run_on(
        student,
        models,
        directory,
        start_from="base",
        teachers=teachers,
        objective=objective or DISTILLATION,
        **{"steps": 1, "tandem": SENIOR_ALONE, "reward": {"function": "none"}} | changes,
    )


def supervised(config: RunSettings, *, resume: bool = False) -> list[dict[str, Any]]:
    """Does what `tandem sft` does; returns the lines of metrics."""
    with (
        RunDirectory.open(config, "sft", resume=resume) as run,
        open_session(config, purpose="sft") as session,
    ):
        train_supervised(session, run, lambda _: None)
        return harness.metrics_without_clock(run.path)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_a_student_comes_closer_to_its_teacher(student, teacher, models, tmp_path, kind):
    [server] = teacher.rollouts
    objective = {"distillation": {"coefficient": 1.0, "kind": kind, "top_k": 64}}
    lines = distil(student, models, tmp_path, {"large": server.address}, objective, steps=30)
    first, last = (
        sum(line["distillation/divergence"] for line in part) / 3
        for part in (lines[:3], lines[-3:])
    )
    assert last < 0.7 * first
    for line in lines:
        assert line["loss/policy"] == 0
        assert line["distillation/divergence/large"] == line["distillation/divergence"]
        assert 0 < line["distillation/teacher_rest"] < 0.5


def test_the_junior_teaches_what_a_server_with_its_weights_does(student, teacher, models, tmp_path):
    [server] = teacher.rollouts
    [by_server] = distil(student, models, tmp_path / "server", {"t": server.address})
    [by_junior] = distil(student, models, tmp_path / "junior", {"t": "junior"})
    assert by_server["distillation/divergence"] > 0.1
    assert {key: by_junior[key] for key in KEYS} == {key: by_server[key] for key in KEYS}


def test_the_likeliest_tokens_come_close_to_the_whole_vocabulary(
    student, teacher, models, tmp_path
):
    [server] = teacher.rollouts
    whole = {"distillation": {"coefficient": 1.0, "kind": "forward"}}
    [exact] = distil(student, models, tmp_path / "whole", {"t": "trainer"}, whole)
    assert exact["distillation/teacher_rest"] is None
    before = 0.0
    for top_k in (4, 32, 128):
        objective = {"distillation": {"coefficient": 1.0, "kind": "forward", "top_k": top_k}}
        [line] = distil(student, models, tmp_path / str(top_k), {"t": server.address}, objective)
        # Joining tokens to a bucket only loses.
        assert before < line["distillation/divergence"] < exact["distillation/divergence"]
        before = line["distillation/divergence"]
    assert before > 0.9 * exact["distillation/divergence"]


def test_a_row_chooses_its_teacher(student, teacher, models, tmp_path):
    rows = tmp_path / "rows.jsonl"
    subjects = ["sums", "words"] * 3
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"the sum of {place} and", "subject": subject}) + "\n"
            for place, subject in enumerate(subjects)
        )
    )
    [server] = teacher.rollouts
    both = {"sums": server.address, "words": "junior"}
    changes = {"teacher_column": "subject", "data": {"jsonl": str(rows)}}
    [line] = distil(student, models, tmp_path / "both", both, **changes)
    # Both have the same weights, but each has its own rows.
    divergences = {name: line[f"distillation/divergence/{name}"] for name in both}
    assert len(set(divergences.values())) == 2
    assert min(divergences.values()) < line["distillation/divergence"] < max(divergences.values())
    with pytest.raises(
        ConfigError, match=r"teacher_column: .*rows.jsonl:2: subject is 'words', but the"
    ):
        distil(
            student,
            models,
            tmp_path / "lacks",
            {"sums": server.address, "other": "junior"},
            **changes,
        )


def test_rewards_and_a_teacher_are_learnt_together(student, teacher, models, tmp_path):
    [server] = teacher.rollouts
    config = harness.run_settings(tmp_path / "reward", models, student)
    [line] = distil(
        student,
        models,
        tmp_path,
        {"t": server.address},
        DISTILLATION | {"junior_token_loss_weight": 0.5},
        tandem=harness.TANDEM["word"],
        reward={"function": config.reward.function},
    )
    assert line["reward/std"] > 0
    assert line["loss/policy"] != 0
    assert line["loss/total"] == pytest.approx(line["loss/policy"] + line["loss/distillation"])
    assert line["policy/weighted_tokens"] == line["tokens/response"]


def test_given_responses_are_learnt_from_a_teacher(student, teacher, models, tmp_path):
    rows = tmp_path / "rows.jsonl"
    words = ["one", "two", "three", "four", "five", "six"]
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"the sum of {word} and", "answer": f" {word} is {word}"}) + "\n"
            for word in words
        )
    )
    [server] = teacher.rollouts

    def run(name: str, teachers: dict[str, str], objective: dict[str, Any], **sft: Any):
        config = harness.run_settings(
            tmp_path / name,
            models,
            student,
            steps=8,
            start_from="base",
            data={"jsonl": str(rows)},
            sft={"batch_size": 6} | sft,
            teachers=teachers,
            objective=objective,
        )
        return supervised(config)

    lines = run("teacher", {"t": server.address}, DISTILLATION, cross_entropy_coefficient=0.0)
    divergences = [line["distillation/divergence"] for line in lines]
    assert divergences[-1] < 0.8 * divergences[0]
    assert [line["loss/total"] for line in lines] == [line["loss/distillation"] for line in lines]
    both = run("both", {"t": server.address}, DISTILLATION)[0]
    plain = run("plain", {}, {})[0]
    assert both["loss/total"] == pytest.approx(plain["loss/total"] + both["loss/distillation"])
    # The trainer's teacher has the same weights, and more to say.
    exact = run("trainer", {"t": "trainer"}, {"distillation": {"coefficient": 1.0}})[0]
    assert exact["distillation/divergence"] > divergences[0]
    with pytest.raises(ConfigError, match=r"sft\.cross_entropy_coefficient: only applies"):
        run("alone", {}, {}, cross_entropy_coefficient=0.5)


def test_a_resumed_run_needs_the_same_teacher(student, teacher, models, tmp_path):
    [server] = teacher.rollouts
    changes = {"steps": 2, "checkpoint": {"every": 1}}
    teachers = {"t": server.address}
    lines = distil(student, models, tmp_path / "whole", teachers, **changes)
    distil(student, models, tmp_path, teachers, **changes | {"steps": 1})
    config = harness.run_settings(
        tmp_path,
        models,
        student,
        start_from="base",
        teachers=teachers,
        objective=DISTILLATION,
        tandem=SENIOR_ALONE,
        reward={"function": "none"},
        **changes,
    )
    facts = json.loads((config.run_dir / "run.json").read_text())
    assert facts["servers"]["teacher_weights"]["t"]["digest"]
    run = harness.run_training(config, resume=True)
    assert harness.metrics_without_clock(run) == lines
    other = config.model_copy(update={"teachers": {"t": "junior"}})
    with pytest.raises(RunDirectoryError, match=r"teachers\.t"):
        harness.run_training(other, resume=True)


BAD = [
    ({"teachers": {}}, "objective.distillation: needs a teacher"),
    ({"objective": {}}, "teachers: only apply to distillation"),
    ({"teachers": {"a": "trainer"}}, r"distillation\.top_k: must be 0 with the teacher `trainer`"),
    ({"teachers": {"a": "trainer", "b": "junior"}}, "teachers: the trainer's teacher_model"),
    (
        {"objective": {"distillation": {"coefficient": 1.0, "top_k": 0}}},
        r"distillation\.top_k: 0 compares the whole vocabulary",
    ),
    ({"teachers": {"a": "junior", "b": "junior"}}, "teacher_column: several teachers need"),
    ({"teacher_column": "subject"}, "teacher_column: only applies to several"),
    (
        {"objective": {"distillation": {"coefficient": 1.0, "top_k": 129}}},
        r"distillation\.top_k",
    ),
    (
        {"objective": {"distillation": {"coefficient": 1.0, "beta": 0.5, "top_k": 8}}},
        r"objective\.distillation\.beta: is given, but only JENSEN_SHANNON",
    ),
    ({"sampling": {"max_tokens": 100_000}}, r"top_k: 64 tokens at each place of sampling"),
]


@pytest.mark.parametrize(("changes", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_a_mistake_is_named_before_the_first_step(student, models, tmp_path, changes, said):
    values = {"teachers": {"a": "junior"}, "objective": DISTILLATION} | changes
    config = harness.run_settings(tmp_path, models, student, start_from="base", **values)
    with pytest.raises(Exception, match=said), open_session(config):
        pass


def test_a_teacher_of_another_vocabulary_is_refused(student, models, tmp_path):
    other = {"senior_model": str(models.other_vocabulary), "junior_model": ""}
    with harness.cluster(tmp_path / "other", models, rollout=other) as running:
        [server] = running.rollouts
        with pytest.raises(ConfigError, match=r"not the tokenizer of the teacher t at"):
            distil(student, models, tmp_path, {"t": server.address})


def test_a_teacher_that_learns_is_refused(student, teacher, models, tmp_path):
    """A trainer publishes to the teacher in the middle of the run."""
    with harness.cluster(tmp_path / "other", models, trainer={}) as running:
        [server] = running.rollouts

        def publish(line: dict[str, Any]) -> None:
            harness.run_on(running, models, tmp_path / "learns", steps=1)

        config = harness.run_settings(
            tmp_path,
            models,
            student,
            steps=2,
            start_from="base",
            teachers={"t": server.address},
            objective=DISTILLATION,
            tandem=SENIOR_ALONE,
            reward={"function": "none"},
        )
        with pytest.raises(FailedPreconditionError, match=r"teachers\.t: .* holds version 1"):
            harness.run_training(config, on_step=publish)


def test_the_run_file_of_the_page_teaches_a_junior(teacher, models, tmp_path):
    """The example of the page: the senior, on a server of its own, teaches the junior."""
    [block] = re.findall(r"test_distillation\.py -->\n\n```yaml\n(.*?)```", PAGE, re.S)
    values = yaml.safe_load(block)
    [server] = teacher.rollouts
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "the sum of two and three"}\n{"prompt": "a question"}\n')
    values["run_dir"] = str(tmp_path / "run")
    values["data"]["jsonl"] = str(rows)
    values["teachers"] = dict.fromkeys(values["teachers"], server.address)
    values["cluster"] |= {"model": str(models.senior), "directory": str(tmp_path / "cluster")}
    values["steps"] = 2
    values["batch"] = {"prompts_per_step": 2, "samples_per_prompt": 2}
    values["sampling"] = {"max_tokens": 8}
    values["max_model_len"] = 64
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    tandem("train", str(file))
    lines = harness.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["reward/mean"] for line in lines] == [0, 0]
    assert all(line["distillation/divergence/senior"] > 0 for line in lines)
