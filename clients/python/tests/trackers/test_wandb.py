"""The real wandb as a tracker. Offline it writes what it would send into a file."""

import json
import struct

import pytest
from commands import lines, tandem
from fakes import wait_until

_BLOCK, _WHOLE, _LAST = 32768, 1, 4


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


def records(file):
    """The records of a .wandb file: a log of LevelDB behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, record = file.read_bytes(), b""
    place = 7
    while place < len(data):
        rest = _BLOCK - place % _BLOCK
        if rest < 7 or len(data) - place < 7:  # padding: a part does not begin there
            place += rest
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)  # behind the checksum
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (_WHOLE, _LAST):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_wandb_gets_every_number_of_a_run(run_file, tmp_path, offline):
    tandem(
        "train", run_file, "trackers=[wandb]", "steps=2", "wandb.project=tests", "wandb.tags=[a]"
    )
    run = tmp_path / "run"
    [file] = run.rglob("*.wandb")
    # The library writes in a process of its own, for which the command does not wait long.
    wait_until(lambda: any(record.HasField("exit") for record in records(file)))
    logged, started = set(), []
    for record in records(file):
        if record.HasField("run"):
            started.append((record.run.project, list(record.run.tags)))
        values = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        step = values.get("step")
        logged |= {(step, key, value) for key, value in values.items() if key != "step"}
    assert started[0] == ("tests", ["a"])
    written = {
        (line["step"], key, value)
        for line in lines(run / "metrics.jsonl")
        for key, value in line.items()
        if value is not None and key != "step"
    }
    assert len(written) > 50
    assert written <= logged
