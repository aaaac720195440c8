"""Checkpoints through the unchanged SDK of Tinker, in front of fake servers."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fakes
import httpx2
import pytest
import tinker
import uvicorn
from tinker import types

from tandem.tinker_server.app import Settings, application

KEY = "tml-any"
DATUM = types.Datum(types.ModelInput.from_ints([3, 4]), {"target_tokens": [4, 5]})


@dataclass
class Served:
    """A server's URL, a client of it, its model, and its REST client."""

    url: str
    service: tinker.ServiceClient
    model: tinker.TrainingClient
    rest: tinker.RestClient
    root: Path

    def directory(self, path):
        """Returns where a checkpoint lies."""
        run, folder, name = path.removeprefix("tinker://").split("/")
        return self.root / run.replace(":", "_") / folder / name

    def save(self, name):
        return self.model.save_state(name).result(timeout=60).path

    def listed(self):
        """Returns the paths of the model's checkpoints."""
        found = self.rest.list_checkpoints(self.model.model_id).result(timeout=60)
        return [one.tinker_path for one in found.checkpoints]

    def delete(self, path):
        self.rest.delete_checkpoint_from_tinker_path(path).result(timeout=60)


@contextmanager
def address(app):
    """Serves an application; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        fakes.wait_until(lambda: server.started)
        [socket] = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def served(world, tmp_path):
    world.rollout_weights = fakes.weights(0)
    root = tmp_path / "checkpoints"
    with (
        fakes.serve(world, "/models/model") as servers,
        address(application(Settings(servers, servers, str(root)))) as url,
    ):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        model = service.create_lora_training_client("model", rank=0).result(timeout=60)
        yield Served(url, service, model, tinker.RestClient(base_url=url, api_key=KEY), root)
        service.close("success").result(timeout=60)


def refused(call, status=400):
    """Returns the message of a call that is refused."""
    with pytest.raises(tinker.APIStatusError) as caught:
        call().result(timeout=60)
    assert caught.value.status_code == status
    return caught.value.body["error"]["message"]


def test_a_deleted_checkpoint_is_gone_and_the_others_stay(served):
    one, two = served.save("one"), served.save("two")
    sampler = served.model.save_weights_for_sampler("one").result(timeout=60).path
    assert served.listed() == [one, two, sampler]
    for path, left in ((one, [two, sampler]), (sampler, [two])):
        assert served.directory(path).is_dir()
        served.delete(path)
        assert not served.directory(path).exists()
        assert served.listed() == left
    assert served.directory(two).is_dir()
    # Its name is free again, its path leads to nothing.
    assert served.save("one") == one
    says = refused(lambda: served.service.create_sampling_client(model_path=sampler))
    assert "was not saved for sampling" in says


def test_a_checkpoint_of_an_earlier_run_can_be_listed_and_deleted(served):
    path = served.save("one")
    run = served.model.model_id
    served.service.close("success").result(timeout=60)
    served.service = tinker.ServiceClient(base_url=served.url, api_key=KEY)
    served.service.create_lora_training_client("model", rank=0).result(timeout=60)
    found = served.rest.list_checkpoints(run).result(timeout=60).checkpoints
    assert [one.tinker_path for one in found] == [path]
    # A server that has started since does not know it.
    elsewhere = served.root / "before_train_0" / "weights" / "one"
    fakes.write_checkpoint(elsewhere)
    served.delete("tinker://before:train:0/weights/one")
    assert not elsewhere.exists()
    # Another spelling of the run is the same directory.
    served.delete(path.replace(":train:", "_train_"))
    assert served.rest.list_user_checkpoints().result(timeout=60).checkpoints == []


@pytest.mark.parametrize("spoil", ["notes", "name", "manifest", "link"])
def test_what_is_not_only_a_checkpoint_stays(served, tmp_path, spoil):
    path = served.save("one")
    directory = served.directory(path)
    if spoil == "notes":
        (directory / "notes.txt").write_text("mine")
        says = "notes.txt does not belong to the checkpoint"
    elif spoil == "name":
        fakes.write_checkpoint(directory, name="another")
        says = "its manifest names the checkpoint 'another'"
    elif spoil == "manifest":
        (directory / "manifest.json").unlink()
        says = "it is not a checkpoint"
    else:
        directory.rename(tmp_path / "one")
        directory.symlink_to(tmp_path / "one")
        says = "it is not a checkpoint"
    before = sorted(directory.rglob("*"))
    refusal = refused(lambda: served.rest.delete_checkpoint_from_tinker_path(path))
    assert refusal == f"path: {path} was not deleted: {says}"
    assert sorted(directory.rglob("*")) == before
    assert served.listed() == [path]


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_checkpoint_in_use_is_not_deleted(served, world, call):
    path = served.save("one")
    begun, go_on = threading.Event(), threading.Event()

    def hold(context):
        begun.set()
        assert go_on.wait(60)

    world.on_save = world.on_load = hold
    if call == "save":
        working = served.model.save_state("one", overwrite=True)
    else:
        working = served.model.load_state(path)
    assert begun.wait(60)
    says = refused(lambda: served.rest.delete_checkpoint_from_tinker_path(path))
    assert "is in use: it is being written, loaded or deleted" in says
    assert served.directory(path).is_dir()
    go_on.set()
    working.result(timeout=60)
    served.delete(path)
    assert served.listed() == []


def test_what_is_not_there_or_leads_elsewhere_is_refused(served, tmp_path):
    run = served.model.model_id
    path = f"tinker://{run}/weights/none"
    says = refused(lambda: served.rest.delete_checkpoint_from_tinker_path(path), 404)
    assert says.startswith(f"path: there is no {path}: this machine has no directory")
    fakes.write_checkpoint(tmp_path / "outside")
    for name in ("one", "weights/a/b", "weights/..", "other/one", "weights/.hidden"):
        answer = httpx2.delete(
            f"{served.url}/api/v1/training_runs/{run}/checkpoints/{name.replace('..', '%2e%2e')}",
            headers={"x-api-key": KEY},
        )
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == "path"
    assert (tmp_path / "outside").is_dir()


def test_lists_are_read_in_parts(served):
    paths = [served.save(name) for name in "abc"]

    def part(limit, offset):
        found = served.rest.list_user_checkpoints(limit, offset).result(timeout=60)
        assert found.cursor.total_count == 3
        return [one.tinker_path for one in found.checkpoints]

    assert (part(2, 0), part(2, 2), part(2, 4)) == (paths[:2], paths[2:], [])
    assert served.rest.list_training_runs(limit=5, offset=1).result(timeout=60).training_runs == []
    assert len(served.rest.list_sessions(limit=1).result(timeout=60).sessions) == 1
    says = refused(lambda: served.rest.list_user_checkpoints(limit=-1))
    assert says == "limit: '-1' is not a number from 0"


def test_other_pages_of_checkpoints_are_refused_by_name(served):
    path = served.save("one")
    rest = served.rest
    outside = path.replace("/weights/", "/external_weights/")
    for call, says in (
        (lambda: rest.publish_checkpoint_from_tinker_path(path), "publish: is not served: "),
        (lambda: rest.unpublish_checkpoint_from_tinker_path(path), "publish: is not served: "),
        (lambda: rest.get_external_weights_urls(outside), "external_weights_urls: is not"),
        (lambda: rest.copy_weights(path, "project"), "copy_weights: is not served: "),
        (lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 60), "ttl_seconds: must be null"),
    ):
        assert refused(call).startswith(says)
    # No checkpoint expires.
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(timeout=60)
    assert served.listed() == [path]
