"""The demo against fake servers."""

import sys
from pathlib import Path

import demo
import pytest
from commands import contents, lines, tandem

from tandem.errors import RunDirectoryError
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.terminal.output import Output


def test_a_demo_that_is_interrupted_before_its_training_loses_nothing(run_file, monkeypatch):
    def interrupted(session):
        raise KeyboardInterrupt

    config = loading.load(RunSettings, run_file)
    with demo.open_run(config) as run:
        run.begin()
        run.write_metrics({"step": 1})
    before = contents(run.path)
    monkeypatch.setattr(demo, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(config, Output())
    assert contents(run.path) == before


def test_a_demo_of_servers_that_run_ends_with_what_changed(world, run_file, capsys):
    config = loading.load(RunSettings, run_file, ["eval.modes=[solo, handoff, legibility]"])
    # Training changes the senior: the junior gives its answers other log-probs.
    world.logprob["junior"] = lambda token: -2.0 - world.published
    assert demo.run_demo(config, Output()) == 0
    shown = capsys.readouterr().out
    assert (
        "20 held-out questions, greedy\n\tbefore\tafter\tgain\n"
        "solo\t\t\t\n"
        "  accuracy\t0.0%\t0.0%\t+0.0%\n"
        "  95 % interval\t0.0% to 16.1%\t0.0% to 16.1%\t+0.0% to +0.0%\n"
        "handoff\t\t\t\n"
        "  accuracy\t0.0%\t0.0%\t+0.0%\n"
    ) in shown
    assert (
        "legibility\t\t\t\n"
        "  junior, nats/token\t2.000\t6.000\t\n"
        "  95 % interval\t2.000 to 2.000\t6.000 to 6.000\t\n"
    ) in shown
    written = lines(config.run_dir / "evals.jsonl")
    assert [(line["step"], line["mode"]) for line in written] == [
        (step, mode) for step in (0, 4) for mode in config.eval.modes
    ]
    assert "Step 4: senior, [junior]\ngroup\treward\tprompt\tresponse\n" in shown


def test_a_demo_gives_the_path_of_a_command_that_is_not_on_the_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(demo.command()).resolve() == Path(sys.executable).with_name("tandem").resolve()


def test_a_demo_replaces_no_run_but_an_earlier_demo(run_file):
    config = loading.load(RunSettings, run_file)
    for _ in range(2):
        with demo.open_run(config) as run:
            run.begin()
    assert {file.name for file in (run.path / "logs").iterdir()} == {
        "attempt_1.log",
        "attempt_2.log",
    }
    tandem("train", run_file, "steps=1", "--clean")
    with pytest.raises(RunDirectoryError, match="kind train"):
        demo.open_run(config)
    assert (run.path / "metrics.jsonl").read_text()
