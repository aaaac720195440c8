"""`tandem checkpoint`: ls, verify and export, of directories and of URLs."""

import json

import fakes
import pytest
from commands import contents, tandem
from flaky_store import FlakyFileSystem
from test_export import write_checkpoint

from tandem.stores.manifest import MANIFEST
from tandem.stores.store import Store
from tandem.stores.transfers import upload


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    FlakyFileSystem.reset()
    for step in (5, 10):
        fakes.write_checkpoint(tmp_path / f"run/checkpoints/step_{step:06d}")
    fakes.write_checkpoint(tmp_path / "run/checkpoints/critic/step_000010")
    return tmp_path / "run"


def listed(place):
    return json.loads(tandem("checkpoint", "ls", place, "--json").stdout)["checkpoints"]


def test_the_checkpoints_of_a_run_are_listed_with_what_they_are(run):
    found = listed(run)
    assert [(one["step"], one["whole"]) for one in found] == [(5, True), (10, True), (10, True)]
    assert found[0] == {
        "path": str(run / "checkpoints/step_000005"),
        "kind": "trainer",
        "step": 5,
        "version": 0,
        "run_id": "",
        "bytes": 6,
        "whole": True,
        "problems": [],
        "holds": ["weights"],
    }
    assert listed(run / "checkpoints/step_000010")[0]["step"] == 10
    text = tandem("checkpoint", "ls", run / "checkpoints").stdout.splitlines()
    assert text[0] == f"{run}/checkpoints/step_000005: trainer, step 5, version 0, 0.0 MB, weights"


def test_what_is_not_whole_says_why(run):
    checkpoints = run / "checkpoints"
    (checkpoints / "step_000005/model.safetensors").write_text("{")
    (checkpoints / "step_000010/manifest.json").unlink()
    (checkpoints / ".tandem-tmp-17-0-step_000015").mkdir()
    problems = {one["path"][-11:]: one["problems"] for one in listed(run)}
    assert problems["step_000005"] == ["model.safetensors has 1 bytes, the manifest says 2"]
    assert problems["step_000015"] == [
        "it is not complete: a server writes it, or was killed meanwhile"
    ]
    shown = tandem("checkpoint", "ls", checkpoints).stdout
    assert "step_000010: not whole: manifest.json is missing: it is not complete" in shown


def test_verify_reads_every_byte(run):
    assert "step_000010: whole" in tandem("checkpoint", "verify", run).stdout
    file = run / "checkpoints/critic/step_000010/model.safetensors"
    file.write_text("[]")
    assert listed(run)[-1]["whole"]  # by sizes
    shown = tandem("checkpoint", "verify", run, check=2).stderr
    assert f"{file.parent}: the digest of model.safetensors differs from the manifest's" in shown
    (file.parent / "notes.txt").write_text("")
    shown = tandem("checkpoint", "verify", file.parent, check=2).stderr
    assert "notes.txt does not belong to the checkpoint" in shown


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "tandem-checkpoint", "kind": "x"}'])
def test_a_manifest_that_cannot_be_read_is_damage(run, content):
    (run / "checkpoints/step_000005/manifest.json").write_text(content)
    assert "manifest.json: " in tandem("checkpoint", "verify", run, check=2).stderr


def test_a_place_without_checkpoints_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "none", "flaky://bucket/none"):
        assert (
            f"there is no checkpoint in {place}"
            in tandem("checkpoint", "ls", place, check=2).stderr
        )


def test_urls_are_listed_verified_and_exported(tmp_path, run):
    checkpoint = write_checkpoint(tmp_path / "step_000003")
    _complete(checkpoint)
    url = "flaky://bucket/run/step_000003"
    upload(checkpoint, Store(url, "URL"), MANIFEST)
    assert [one["path"] for one in listed("flaky://bucket/run")] == [url]
    assert tandem("checkpoint", "verify", url).stdout == f"{url}: whole\n"
    tandem("export", checkpoint, tmp_path / "here")
    tandem("checkpoint", "export", url, "flaky://bucket/models/one")
    stored = Store("flaky://bucket/models/one", "URL")
    assert {name: stored.read(name) for name in stored.files()} == contents(tmp_path / "here")
    assert FlakyFileSystem.written[-1] == "bucket/models/one/config.json"
    shown = tandem("export", checkpoint, "flaky://bucket/models/one", check=2).stderr
    assert "DIR: flaky://bucket/models/one exists" in shown


def test_a_server_does_not_export_to_a_url():
    shown = tandem("export", "served", "s3://bucket/one", check=2).stderr
    assert "DIR: s3://bucket/one: the server writes only to its own file system" in shown


def _complete(checkpoint):
    """Gives the manifest what it says of its checkpoint, and of the files' sizes."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for file in manifest["files"]:
        file["bytes"] = (checkpoint / file["name"]).stat().st_size
    manifest |= {"format": "tandem-checkpoint", "kind": "trainer", "step": 3}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
