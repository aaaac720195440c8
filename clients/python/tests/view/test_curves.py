"""`tandem plot`: metrics and evaluations of runs as curves."""

import json

import pytest
from commands import tandem

from tandem.errors import ConfigError, RunDirectoryError
from tandem.view.curves import DEFAULTS, Curve, choose, draw, picture, read_curves, without_repeats


def write_run(path, metrics, evals=()):
    path.mkdir(parents=True)
    (path / "run.json").write_text('{"run_id": "run-1", "kind": "train"}')
    for name, rows in (("metrics.jsonl", metrics), ("evals.jsonl", evals)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mean_rewards_are_drawn_where_they_are_not_the_accuracy():
    names = ["reward/mean", "eval/solo/accuracy", "eval/solo/reward/mean"]
    flat = {name: Curve([4], [0.25]) for name in names}
    assert without_repeats({"a": flat, "b": flat}, names) == names[:2]
    graded = flat | {"eval/solo/reward/mean": Curve([4], [0.4])}
    assert without_repeats({"a": flat, "b": graded}, names) == names


def test_every_panel_says_what_its_axis_is():
    curve = Curve([1, 2], [0.1, 0.2])
    panels = picture({"run": {"a": curve, "b": curve}}, ["a", "b"], smoothing=0.0).axes
    assert [panel.get_xlabel() for panel in panels] == ["step", "step"]


def test_numbers_of_metrics_and_evaluations_are_curves(tmp_path):
    metrics = [
        {"step": 1, "reward/mean": 0.5, "loss/kl": None},
        {"step": 2, "reward/mean": None, "loss/kl": 0.25},
        {"step": 3, "reward/mean": 1, "loss/kl": 0.5},
    ]
    evals = [{"step": 0, "mode": "solo", "accuracy": 0.25, "pass_at": {"4": 0.75}}]
    run = write_run(tmp_path / "run", metrics, evals)
    # An unfinished line, as while the run goes on.
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    assert read_curves(run) == {
        "reward/mean": Curve([1, 3], [0.5, 1]),
        "loss/kl": Curve([2, 3], [0.25, 0.5]),
        "eval/solo/accuracy": Curve([0], [0.25]),
        "eval/solo/pass_at/4": Curve([0], [0.75]),
    }


def test_a_directory_without_a_run_or_steps_and_a_damaged_line_are_named(tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        read_curves(tmp_path)
    with pytest.raises(RunDirectoryError, match="no step has finished yet"):
        read_curves(write_run(tmp_path / "empty", []))
    run = write_run(tmp_path / "run", [{"step": 1}, {"steps": 2}])
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2: step: not an integer"):
        read_curves(run)


def test_a_moving_average_forgets_that_it_started_from_zero():
    curve = Curve([1, 2, 3], [4.0, 4.0, 8.0])
    # (0.25 · 4 + 0.5 · 8 + 0.125 · 4) / 0.875
    assert curve.smoothed(0.5) == Curve([1, 2, 3], [4.0, 4.0, pytest.approx(44 / 7)])
    assert curve.smoothed(0.0) == curve


def test_names_and_patterns_choose_and_what_is_unknown_has_a_suggestion():
    known = ["time/train_seconds", "reward/mean", "time/generate_seconds", "reward/std"]
    assert choose([], known) == ["reward/mean", "time/generate_seconds", "time/train_seconds"]
    assert choose([], ["critic/loss", "reward/std"]) == ["critic/loss", "reward/std"]
    assert choose(["time/*", "reward/mean", "time/train_seconds"], known) == [
        "time/train_seconds",
        "time/generate_seconds",
        "reward/mean",
    ]
    with pytest.raises(ConfigError, match=r"--metric 'reward/maen': .*did you mean 'reward/mean'"):
        choose(["reward/maen"], known)
    with pytest.raises(ConfigError, match="known: time/train_seconds, reward/mean"):
        choose(["critic/loss"], known)
    with pytest.raises(ConfigError, match=r"fraction is now tandem/senior_token_fraction$"):
        choose(["tandem/primary_token_fraction"], known)


RUNS = {
    "runs/a": {"reward/mean": Curve([1, 2], [0.0, 1.0]), "loss/total": Curve([1], [3.0])},
    "_b$x$": {"reward/mean": Curve([1, 2], [1.0, 0.0])},
}


def test_a_picture_has_a_panel_for_each_name_and_a_line_for_each_run():
    drawn = picture(RUNS, ["reward/mean", "loss/total"], smoothing=0)
    lines = {
        panel.get_title(): [list(line.get_ydata()) for line in panel.lines] for panel in drawn.axes
    }
    assert lines == {"reward/mean": [[0.0, 1.0], [1.0, 0.0]], "loss/total": [[3.0]]}
    a, b = drawn.axes[0].lines
    assert a.get_color() != b.get_color()
    assert a.get_linestyle() != b.get_linestyle()
    [legend] = drawn.legends
    assert [text.get_text().strip() for text in legend.get_texts()] == ["runs/a", "_b$x$"]
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_smoothing_leaves_the_values_behind_the_average():
    [panel] = picture(RUNS, ["reward/mean"], smoothing=0.5).axes
    values = [list(line.get_ydata()) for line in panel.lines]
    assert values[:2] == [[0.0, 1.0], RUNS["runs/a"]["reward/mean"].smoothed(0.5).values]
    assert panel.lines[0].get_alpha() < 1


def test_an_interval_is_drawn_and_not_smoothed():
    accuracy = Curve([0, 4], [0.2, 0.6])
    run = {"eval/solo/accuracy": accuracy}
    interval = {"eval/solo/accuracy_low": Curve([0, 4], [0.1, 0.5])}
    interval |= {"eval/solo/accuracy_high": Curve([0, 4], [0.3, 0.7])}
    [panel] = picture({"run": run | interval}, ["eval/solo/accuracy"], smoothing=0.9).axes
    [(line, _, [bars])] = panel.containers
    assert list(line.get_ydata()) == accuracy.values
    ends = [[y for _, y in bar] for bar in bars.get_segments()]
    assert ends == [pytest.approx([0.1, 0.3]), pytest.approx([0.5, 0.7])]


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, suffix, start):
    file = tmp_path / f"runs.{suffix}"
    draw(RUNS, ["reward/mean"], file)
    assert file.read_bytes().startswith(start)


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--output .*runs\.bmp: .*png, svg, pdf"):
        draw(RUNS, ["reward/mean"], tmp_path / "runs.bmp")
    with pytest.raises(RunDirectoryError, match="No such file"):
        draw(RUNS, ["reward/mean"], tmp_path / "nowhere" / "runs.png")


def test_plot_draws_what_runs_wrote(run_file, tmp_path):
    tandem("train", run_file, "eval.every=2")
    run = tmp_path / "run"
    done = json.loads(tandem("plot", run, "--json").stdout)
    assert done["picture"] == str(run / "metrics.png")
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")
    # Rewards of exact_match are the accuracy.
    drawn = {name for name in DEFAULTS if name in read_curves(run)} - {"eval/solo/reward/mean"}
    assert set(done["metrics"]) == drawn
    assert {"loss/total", "eval/solo/accuracy", "time/train_seconds"} <= set(done["metrics"])
    assert "--output" in tandem("plot", run, run, check=2).stderr
    file = tmp_path / "both.svg"
    options = ["--metric", "eval/solo/*", "--smoothing", 0.6, "--output", file, "--json"]
    done = json.loads(tandem("plot", run, run, *options).stdout)
    assert {"eval/solo/accuracy", "eval/solo/pass_at/1"} <= set(done["metrics"])
    assert file.exists()
    unknown = tandem("plot", run, "--metric", "eval/solo/acuracy", check=2).stderr
    assert "did you mean 'eval/solo/accuracy'" in unknown
