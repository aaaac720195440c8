"""Commands find running clusters, and none stumbles over a state folder that is of no use."""

import fcntl
import json
import os
import stat
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from commands import tandem

from tandem.cluster import registry
from tandem.rpc.credentials import Credentials
from tandem.settings.cluster import ClusterSettings

WHOLE = {
    "directory": "/other",
    "credentials": {},
    "servers": [{"name": "trainer", "role": "trainer", "rank": 0, "address": "127.0.0.1:1"}],
}
DAMAGED = {
    "empty": "",
    "cut": '{"directory": "/ot',
    "no mapping": "[]",
    "bytes": b"\xff\xfe\x00",
    "no servers": json.dumps({"directory": "/other", "credentials": {}}),
    "servers of text": json.dumps(WHOLE | {"servers": ["trainer"]}),
    "server without address": json.dumps(WHOLE | {"servers": [{"role": "trainer", "rank": 0}]}),
    "unknown role": json.dumps(WHOLE | {"servers": [WHOLE["servers"][0] | {"role": "queen"}]}),
    "credentials of another kind": json.dumps(WHOLE | {"credentials": {"password": "x"}}),
    "deep": "[" * 100_000,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "tandem" / "clusters"
    folder.mkdir(parents=True)
    return folder


@contextmanager
def held(record, content):
    """A record as a running `tandem up` holds it."""
    record.write_bytes(content if isinstance(content, bytes) else content.encode())
    with record.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_damaged_record_is_passed_over(folder, subtests):
    for damage in DAMAGED:
        with (
            subtests.test(damage=damage),
            held(folder / "1.json", DAMAGED[damage]),
            held(folder / "2.json", json.dumps(WHOLE)),
        ):
            [found] = registry.clusters()
            assert found == WHOLE
            [server] = registry.servers()
            assert server["address"] == "127.0.0.1:1"


@pytest.mark.parametrize("command", [["status"], ["generate", "w1", "--tokenizer", "/none"]])
def test_commands_without_a_home_find_no_cluster_and_say_so(monkeypatch, command):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert registry.clusters() == []
    said = tandem(*command, check=2 if "generate" in command else 3)
    assert "home" not in said.stderr


def test_a_record_is_an_offer_that_may_fail(tmp_path, monkeypatch, notes):
    settings = ClusterSettings(trainer={}, directory=tmp_path)
    cluster = SimpleNamespace(settings=settings, credentials=Credentials(), servers=[])
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError))
    with registry.announced(cluster):
        pass
    assert notes == ["other commands cannot find these servers: HOME is not set"]


def test_an_old_record_in_a_folder_that_may_not_be_written_is_passed_over(folder, monkeypatch):
    (folder / "1.json").write_text(json.dumps(WHOLE))

    def refuse(self, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    assert registry.clusters() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_holds_no_cluster(folder):
    folder.chmod(stat.S_IWUSR)
    try:
        assert registry.clusters() == []
    finally:
        folder.chmod(stat.S_IRWXU)
