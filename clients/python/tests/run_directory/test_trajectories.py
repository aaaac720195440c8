"""Files of trajectories: what they hold, writing them beside the steps, and reading old and new."""

import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import get_args

import fakes
import numpy as np
import pyarrow
import pytest
from commands import lines, records, tandem
from pyarrow import parquet

from tandem._proto.types.v1 import vision_pb2
from tandem.errors import RunDirectoryError
from tandem.rpc.requests import Prompt
from tandem.rpc.wire import to_tensor
from tandem.run_directory.trajectories import writer as writer_module
from tandem.run_directory.trajectories.files import (
    TrajectoryFile,
    evaluation_file,
    open_records,
    read_records,
    step_file,
    trajectory_files,
)
from tandem.run_directory.trajectories.record import Response, trajectory_record
from tandem.run_directory.trajectories.writer import TrajectoryWriter, write_parquet
from tandem.settings.run import EvalMode, TrajectorySettings

# Files that the writers of two earlier releases made of variety().
EARLIER_RELEASES = Path(__file__).parent / "earlier_releases"


def sample(index=0, seed=1, **changes):
    """A response of the fake server."""
    message = Prompt(
        token_ids=[3, 4, 5 + index],
        seed=seed,
        sampling={"max_tokens": 20, "temperature": 0.7, "top_p": 0.9},
        return_other_logprobs=True,
        **changes,
    ).message()
    return fakes.sample(message, index, version=2)


def variety():
    """Responses that differ in all that a record may or may not have."""
    plain = sample(0)
    solo = sample(1, tandem={"enabled": False})
    lonely = sample(2, seed=2**64 - 1)
    lonely.ClearField("other_logprobs")
    drafted = sample(3)
    drafted.accepted_draft_mask = bytes(t % 2 for t in range(len(drafted.response_token_ids)))
    length = len(drafted.response_token_ids)
    drafted.log_keep_mass.CopyFrom(to_tensor(np.linspace(-0.7, 0, length)))
    drafted.junior_version = "j1"
    pictured = sample(4)
    pictured.vision_inputs.append(
        vision_pb2.VisionInput(kind=2, digest="d" * 64, grid_t=2, grid_h=4, grid_w=6)
    )
    pictured.senior_versions[0].count -= 1
    pictured.senior_versions.append(pictured.senior_versions[0])
    mask = plain.authorship_mask
    plain.authorship_mask = mask[:1] + b"\2" + mask[2:]  # what an environment said
    row = {"answer": 5, "nested": {"a": [1, None, "é"]}, "bad": math.nan, "猫": "\u2028"}
    return [
        Response(plain, "text\n", 0.1, {"right": 0.1}, -0.5, "g0", "rows.jsonl:1", row),
        Response(solo, "", None, {"right": None, "short": 1.0}, 0.0, "g0", None, None),
        Response(lonely, "猫\0", -1e9, {}, 0.0, "g1", "rows.jsonl:2", {}),
        Response(drafted, "x", 1.0, group_id="g1"),
        Response(pictured, "y", 0.0, group_id="g2", row=row),
    ]


def test_a_file_gives_back_the_records_that_were_json(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, variety())
    expected = [json.loads(json.dumps(trajectory_record(one))) for one in variety()]
    assert read_records(file) == expected


def test_the_bytes_of_a_file_follow_from_its_responses(tmp_path):
    for name in "ab":
        write_parquet(tmp_path / name, variety())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("tokens", [1, 30, 10**6])
def test_a_file_of_any_number_of_row_groups_is_read_by_index(tmp_path, monkeypatch, tokens):
    monkeypatch.setattr(writer_module, "_GROUP_TOKENS", tokens)
    file = tmp_path / "a.parquet"
    responses = variety() * 3
    write_parquet(file, iter(responses))
    expected = [trajectory_record(one) for one in responses]
    groups = parquet.ParquetFile(file).num_row_groups
    assert groups == {1: 15, 10**6: 1}.get(tokens, groups)
    found = open_records(file)
    assert [head.text for head in found.heads] == [one.text for one in responses]
    assert list(found.read({0, 7, 14})) == [expected[i] for i in (0, 7, 14)]
    assert list(found.read(set())) == []
    assert list(found.read()) == expected


def test_a_step_without_responses_is_a_file_without_rows(tmp_path):
    write_parquet(tmp_path / "a.parquet", [])
    assert read_records(tmp_path / "a.parquet") == []


def test_texts_that_utf8_cannot_hold_are_kept_by_their_escapes(tmp_path):
    bad = "a\ud83d"
    one = Response(sample(), bad, scores={bad: 1.0}, group_id=bad, place=bad, row={"x": bad})
    write_parquet(tmp_path / "a.parquet", [one])
    [record] = read_records(tmp_path / "a.parquet")
    assert record["text"] == record["group_id"] == record["place"] == "a\\ud83d"
    assert record["row"] == {"x": bad}


@pytest.mark.parametrize("mode", ["", *get_args(EvalMode)])
def test_files_are_found_by_the_names_that_a_run_gives(tmp_path, mode):
    path = evaluation_file(tmp_path, 12, mode) if mode else step_file(tmp_path, 12)
    path.parent.mkdir()
    path.touch()
    assert trajectory_files(path.parent) == [TrajectoryFile(12, mode, path)]


def test_log_probs_may_be_left_out(tmp_path):
    write_parquet(tmp_path / "a.parquet", variety(), logprobs=False)
    for record, one in zip(read_records(tmp_path / "a.parquet"), variety(), strict=True):
        missing = ("senior_logprobs", "junior_logprobs", "log_keep_mass")
        assert {record.pop(name) for name in missing} == {None}
        assert record == {k: v for k, v in trajectory_record(one).items() if k not in missing}


def test_any_tool_reads_the_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", variety())
    table = parquet.read_table(tmp_path / "a.parquet")
    first = table.slice(0, 1).to_pylist()[0]
    assert first["response_token_ids"] == list(sample(0).response_token_ids)
    assert first["reward"] == 0.1
    assert json.loads(first["row"])["answer"] == 5
    assert table.schema.field("senior_logprobs").type == pyarrow.list_(pyarrow.float32())


def changed(file, name, values, kind=None):
    """Writes the file again with other values in a column, or without it (None)."""
    table = parquet.read_table(file)
    index = table.schema.get_field_index(name)
    if values is None:
        table = table.remove_column(index)
    else:
        field = table.schema.field(index) if kind is None else pyarrow.field(name, kind)
        table = table.set_column(index, field, pyarrow.array(values, field.type))
    parquet.write_table(table, file)


def test_damage_is_named_by_file_record_and_column(tmp_path, subtests):
    for name, values, kind, says in [
        ("text", None, None, ": text: the column is missing"),
        ("reward", ["high"], pyarrow.string(), ": reward: has type string, not double"),
        ("group_id", [None], None, ":1: group_id: is null"),
        ("finish_reason", [None], None, ":1: finish_reason: "),
        ("authorship_mask", [[1, 0]], None, ":1: authorship_mask: 2 entries for"),
        ("authorship_mask", [[3] * 20], None, ":1: authorship_mask.0: "),
        ("response_token_ids", [[-1] * 20], None, ":1: response_token_ids.0: "),
        ("reward", [math.inf], None, ":1: reward: "),
        ("row", ["[]"], None, ":1: row: "),
        ("row", ["{"], None, ":1: row: "),
    ]:
        with subtests.test(name=name, values=values, kind=kind, says=says):
            file = tmp_path / "a.parquet"
            write_parquet(file, [Response(sample(), "x", 0.5)])
            changed(file, name, values, kind)
            with pytest.raises(RunDirectoryError) as caught:
                read_records(file)
            assert str(caught.value).startswith(f"{file}{says}")


@pytest.mark.parametrize("size", [0, 3, 100, 2000])
def test_a_file_that_was_cut_is_named(tmp_path, size):
    file = tmp_path / "a.parquet"
    write_parquet(file, variety())
    assert file.stat().st_size > size
    os.truncate(file, size)
    with pytest.raises(RunDirectoryError, match=f"^{file}: "):
        read_records(file)


def test_pages_that_were_changed_are_named(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, variety())
    data = bytearray(file.read_bytes())
    data[10:200] = bytes(190)
    file.write_bytes(data)
    with pytest.raises(RunDirectoryError, match=f"^{file}"):
        read_records(file)


def test_a_folder_is_listed_by_step_and_mode_whoever_wrote_it(tmp_path):
    for name in ("step_10.parquet", "step_9.jsonl", "step_2.jsonl", "step_2.parquet"):
        (tmp_path / name).touch()
    for name in ("step_2.solo.parquet", "step_x.parquet", "step_3.csv", ".step_4.parquet.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "step_5.parquet").mkdir()
    found = [(one.step, one.mode, one.path.name) for one in trajectory_files(tmp_path)]
    assert found == [
        (2, "", "step_2.parquet"),
        (2, "solo", "step_2.solo.parquet"),
        (9, "", "step_9.jsonl"),
        (10, "", "step_10.parquet"),
    ]
    assert TrajectoryFile.of(evaluation_file(tmp_path, 3, "handoff")).mode == "handoff"


def without_places(record):
    """The record without what files of earlier releases lack: where an image stands."""
    images = [
        {key: value for key, value in image.items() if key != "first_token"}
        for image in record["vision_inputs"]
    ]
    return record | {"vision_inputs": images}


def test_files_of_earlier_releases_are_read_and_viewed(run_file, tmp_path):
    """JSON lines, and Parquet of before an environment could speak: variety() without its turn."""
    responses = variety()
    plain = responses[0].trajectory
    plain.authorship_mask = sample(0).authorship_mask
    expected = [without_places(json.loads(json.dumps(trajectory_record(r)))) for r in responses]
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    for step, name in ((1, "step_1.jsonl"), (2, "step_2.parquet")):
        assert read_records(EARLIER_RELEASES / name) == expected
        step_file(run, step).unlink()
        shutil.copy(EARLIER_RELEASES / name, run / "trajectories")
    shown = tandem("view", run, "--step", ":", "--json").stdout.splitlines()
    assert [json.loads(line) for line in shown] == [*expected, *expected]
    assert tandem("view", run, "--step", "1", "--gap").stdout.startswith("Step 1, 5 of 5 ")
    assert tandem("view", run, "--gap", "--drafts").stdout.startswith("Step 2, 5 of 5 ")
    page = tmp_path / "page.html"
    tandem("view", run, "--step", ":", "--output", page)
    assert page.stat().st_size > 1000


def names(folder):
    """The names of a folder's entries."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    for name in ("trajectories", "evaluations"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_step_does_not_wait_for_its_own_file_and_the_next_one_does(folder, notes):
    writer = TrajectoryWriter(folder, TrajectorySettings())
    go, order = threading.Event(), []

    def slow():
        go.wait()
        yield Response(sample(), "1")
        order.append("the first is written")

    def next_one():
        order.append("the second begins")
        yield Response(sample(), "2")

    with writer:
        writer.write_step(1, slow())  # Returns, though the first response is not there yet.
        other = threading.Thread(target=writer.write_step, args=(2, next_one()))
        other.start()
        go.set()
        other.join()
    assert order == ["the first is written", "the second begins"]
    assert [record["text"] for step in (1, 2) for record in records(folder, step)] == ["1", "2"]
    assert (writer.lost, notes) == (0, [])


def test_settings_choose_the_steps_and_how_many_are_kept(folder):
    writer = TrajectoryWriter(folder, TrajectorySettings(every=2, keep=3))
    (folder / "trajectories" / "step_2.jsonl").touch()
    with writer:
        for step in range(3, 13):
            writer.write_step(step, [Response(sample(), "x")])
            for mode in ("solo", "handoff"):
                writer.write_evaluation(step, mode, [Response(sample(), "x")])
    assert names(folder / "trajectories") == [
        "step_10.parquet",
        "step_12.parquet",
        "step_8.parquet",
    ]
    assert {(one.step, one.mode) for one in trajectory_files(folder / "evaluations")} == {
        (step, mode) for step in (10, 11, 12) for mode in ("solo", "handoff")
    }
    none = TrajectoryWriter(folder, TrajectorySettings(every=0))
    none.write_step(100, [Response(sample(), "x")])
    none.wait()
    assert not step_file(folder, 100).exists()


def test_what_cannot_be_written_is_noted_once_and_counted(folder, monkeypatch, notes):
    writer = TrajectoryWriter(folder, TrajectorySettings())
    fsync = os.fsync

    def full(_):
        raise OSError(28, "No space left on device")

    writer.write_step(1, [Response(sample(), "x")])
    writer.wait()
    monkeypatch.setattr(os, "fsync", full)
    for step in (2, 3):
        writer.write_step(step, [Response(sample(), "x")])
    writer.wait()
    monkeypatch.setattr(os, "fsync", fsync)
    writer.write_step(4, [Response(sample(), "x")])
    writer.wait()
    with writer:
        writer.write_step(5, iter([None]))  # not even a response
    assert (writer.lost, writer.take_lost(), writer.take_lost()) == (3, 3, 0)
    second, fifth = step_file(folder, 2), step_file(folder, 5)
    assert notes[0].startswith(f"warning: {second} could not be written: No space left on device;")
    assert notes[1] == f"{step_file(folder, 4)}: trajectories can be written again"
    assert notes[2].startswith(f"warning: {fifth} could not be written: AttributeError(")
    assert notes[3:] == ["warning: 3 trajectory files could not be written"]
    assert names(folder / "trajectories") == ["step_1.parquet", "step_4.parquet"]


def test_a_file_that_is_given_up_ends_soon_and_is_no_loss(folder, notes):
    begun = threading.Event()

    def endless():
        while True:
            begun.set()
            yield Response(sample(), "x")

    writer = TrajectoryWriter(folder, TrajectorySettings())
    with pytest.raises(KeyboardInterrupt), writer:
        writer.write_step(1, endless())
        begun.wait()
        raise KeyboardInterrupt
    assert (names(folder / "trajectories"), writer.lost, notes) == ([], 0, [])


def test_a_run_goes_on_without_its_trajectories(run_file, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module, "write_parquet", full)
    shown = tandem("train", run_file, "steps=3").stdout
    assert shown.count("could not be written: OSError(28") == 1
    assert "warning: 3 trajectory files could not be written" in shown
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    # A loss is known when the next file is to be written, or the checkpoint saved.
    assert [line["trajectories/lost"] for line in metrics] == [0, 1, 2]
    assert "trajectory files that could not be written: 3" in shown
    monkeypatch.undo()
    tandem("train", run_file, "steps=4", "--resume")
    assert [step_file(tmp_path / "run", step).exists() for step in (3, 4)] == [False, True]


def test_a_resumed_run_needs_none_of_the_files_before(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    kept = records(run, 2)
    step_file(run, 1).unlink()
    step_file(run, 2).write_bytes(b"cut")
    # An earlier release wrote this one.
    (run / "trajectories" / "step_2.jsonl").write_text(json.dumps(kept[0]) + "\n")
    step_file(run, 2).unlink()
    tandem("train", run_file, "--resume", "trajectories.every=2", "trajectories.logprobs=false")
    assert names(run / "trajectories") == ["step_2.jsonl", "step_4.parquet"]
    assert records(run, 4)[0]["senior_logprobs"] is None
    shown = tandem("view", run, "--step", ":", "--json").stdout.splitlines()
    assert json.loads(shown[0]) == kept[0]
    assert len(shown) == 1 + 6
    assert tandem("view", run, "--gap", "--drafts").stdout.startswith("Step 4, 6 of 6 ")
    page = tmp_path / "page.html"
    tandem("view", run, "--output", page)
    assert page.stat().st_size > 1000


def test_resume_and_clean_remove_what_a_run_wrote_after(run_file, tmp_path):
    tandem("train", run_file, "steps=2", "eval.every=1")
    run = tmp_path / "run"
    mine = run / "trajectories" / "mine.parquet"
    mine.write_text("mine")
    for name in ("trajectories/step_3.parquet", "trajectories/.step_3.parquet.tmp"):
        (run / name).write_text("cut")
    (run / "evaluations" / "step_3.solo.parquet").write_text("cut")
    tandem("train", run_file, "--resume", "steps=3", "trajectories.every=2", "eval.every=0")
    assert not (run / "trajectories" / "step_3.parquet").exists()
    assert not (run / "trajectories" / ".step_3.parquet.tmp").exists()
    left = ["step_0.solo.parquet", "step_1.solo.parquet", "step_2.solo.parquet"]
    assert names(run / "evaluations") == left
    tandem("train", run_file, "--clean", "steps=1", "trajectories.every=0")
    assert names(run / "trajectories") == ["mine.parquet"]
    assert names(run / "evaluations") == []


def test_records_are_written_as_json_lines(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run, file = tmp_path / "run", tmp_path / "all.jsonl"
    done = tandem("view", run, "--step", ":", "--output", file)
    assert f"{file}: 12 records" in done.stdout
    assert lines(file) == records(run, 1) + records(run, 2)
    done = tandem("view", run, "--output", file, "--count", 1, "--json")
    assert json.loads(done.stdout) == {"records": str(file), "count": 1}
    assert lines(file) == records(run, 1)[:1]
    assert "all.jsonl contains the rec" in tandem("view", run, "-o", file, "--gap", check=2).stderr
    before = file.read_bytes()
    step_file(run, 2).write_bytes(b"cut")
    tandem("view", run, "--step", ":", "--output", file, check=2)
    assert file.read_bytes() == before
