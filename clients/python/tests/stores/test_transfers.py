"""Copies of directories between stores and this machine."""

import zipfile

import fakes
import pytest
from commands import contents
from flaky_store import FlakyFileSystem

from tandem.errors import ConfigError, StorageError
from tandem.models.hub import local_model
from tandem.stores.manifest import MANIFEST
from tandem.stores.store import Store, is_url, shown
from tandem.stores.transfers import copy_to, fetch, fetch_checkpoint, upload


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    FlakyFileSystem.reset()
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path):
    fakes.write_checkpoint(tmp_path / "step_000003")
    return tmp_path / "step_000003"


def put(folder, url, last=MANIFEST):
    upload(folder, Store(url, "URL"), last, first="tandem_state.json")
    return url


def test_paths_and_names_of_the_hub_are_no_urls():
    assert (
        is_url("s3://bucket/one") and is_url("zip://one::file:///x.zip") and is_url("zip::s3://x")
    )
    assert not any(map(is_url, ("models/one", "Qwen/Qwen2.5-0.5B", "/models/a:b", "C:/x")))


def test_a_password_is_not_shown():
    url = "sftp://me:secret@host/models"
    assert shown(url) == "sftp://host/models"
    assert "secret" not in str(Store.child(Store("memory://m", "URL"), "x"))


@pytest.mark.parametrize("url", ["flaky://bucket/runs/step_000003", "file://{}/far/step_000003"])
def test_a_checkpoint_comes_back_as_it_was(checkpoint, tmp_path, url):
    put(checkpoint, url := url.format(tmp_path))
    copy = fetch_checkpoint(url, "start_from")
    assert copy.name == "step_000003"  # the name in its manifest
    assert contents(copy) == contents(checkpoint)


def test_an_archive_is_a_store(checkpoint, tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name, content in contents(checkpoint).items():
            archive.writestr(f"step_000003/{name}", content)
    copy = fetch_checkpoint(f"zip://step_000003::file://{tmp_path}/all.zip", "start_from")
    assert contents(copy) == contents(checkpoint)


def test_what_did_not_change_is_not_fetched_again(checkpoint, tmp_path):
    url = put(checkpoint, "flaky://bucket/step_000003")
    first = fetch_checkpoint(url, "start_from")
    (first / "marker").write_text("")
    assert (fetch_checkpoint(url, "start_from") / "marker").exists()
    put(checkpoint, url)
    assert not (fetch_checkpoint(url, "start_from") / "marker").exists()


def test_the_manifest_comes_last(checkpoint):
    put(checkpoint, "flaky://b/one")
    assert FlakyFileSystem.written[0] == "b/one/tandem_state.json"
    assert FlakyFileSystem.written[-1] == "b/one/manifest.json"


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json", "manifest.json"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_part_of_an_upload_is_not_taken_for_a_checkpoint(checkpoint, broken, again):
    url = "flaky://b/step_000003"
    if again:
        put(checkpoint, url)

    def fail(name):
        if name == broken:
            raise OSError("the connection is gone")

    FlakyFileSystem.before_write = staticmethod(fail)
    with pytest.raises(StorageError, match=f"{broken}: OSError: the connection is gone"):
        put(checkpoint, url)
    with pytest.raises(ConfigError, match=r"start_from: .* a checkpoint without manifest\.json"):
        fetch_checkpoint(url, "start_from")
    FlakyFileSystem.before_write = staticmethod(lambda name: None)
    put(checkpoint, url)
    assert contents(fetch_checkpoint(url, "start_from")) == contents(checkpoint)


def test_a_damaged_file_is_named_and_nothing_stays(checkpoint, tmp_path, cache):
    url = put(checkpoint, "flaky://b/step_000003")
    Store(url, "URL").write("model.safetensors", b"[]")
    with pytest.raises(ConfigError, match=r"start_from: .*the digest of model\.safetensors"):
        fetch_checkpoint(url, "start_from")
    with pytest.raises(ConfigError, match=r"the digest of model\.safetensors"):
        copy_to(tmp_path / "copy", Store(url, "URL"), "URL")
    assert not (tmp_path / "copy").exists()
    assert not list(cache.rglob("model.safetensors"))


def test_files_of_an_earlier_copy_go(checkpoint, tmp_path):
    url = put(checkpoint, "flaky://b/step_000003")
    Store(url, "URL").write("left/over.txt", b"")
    put(checkpoint, url)
    assert set(Store(url, "URL").files()) == set(contents(checkpoint))


def test_a_model_is_fetched_without_what_only_training_reads(checkpoint, tmp_path):
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    (checkpoint / "config.json").write_text("{}")
    url = put(checkpoint, "flaky://models/one")
    model = local_model(url, tmp_path, "cluster.model")
    assert model.name == "one"
    assert set(contents(model)) == {"config.json", "model.safetensors"}
    tokenizer = local_model(url, tmp_path, "tokenizer", weights=False)
    assert set(contents(tokenizer)) == {"config.json"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("flaky://b/none", "does not exist"),
        ("nothing://b/none", "Protocol not known"),
    ],
)
def test_a_place_that_is_not_there_is_named_with_its_field(url, message, tmp_path):
    with pytest.raises(ConfigError, match=f"cluster.model: {url}.*{message}"):
        local_model(url, tmp_path, "cluster.model")


def test_a_failing_store_is_an_error_of_storage():
    with pytest.raises(StorageError, match=r"flaky://b/x/one\.json: FileNotFoundError"):
        Store("flaky://b/x", "URL").read("one.json")


def test_a_directory_that_is_neither_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    url = put(tmp_path / "other", "flaky://b/other")
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run directory"):
        fetch_checkpoint(url, "start_from")
    assert fetch(Store(url, "URL"), "URL").name == "other"
