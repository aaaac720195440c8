"""Versions agree, a release is checked before it is built, and its wheel works."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from check_layers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "release"))
import build
import versions

CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()


@pytest.fixture
def copy(tmp_path):
    """A committed tree with the files that hold the version, and a changelog."""
    for place in versions.places():
        (tmp_path / place.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / place.file, tmp_path / place.file)
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [7.8.9] - 2026-01-02\n\n- A\n")
    versions.write("7.8.9", tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True)


def test_the_version_is_the_same_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions.version())
    files = {place.file for place in versions.places()}
    assert {"CMakeLists.txt", "clients/python/tandem/__init__.py"} <= files


def test_deployments_name_the_version_where_a_release_finds_it():
    known = {(place.file, place.line) for place in versions.places()}
    number = re.compile(rf"(?<![\d.]){re.escape(versions.version())}(?![\d.])")
    files = [file for file in (REPOSITORY / "deploy").rglob("*") if file.is_file()]
    assert files
    for file in files:
        for line, text in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if number.search(text):
                assert (str(file.relative_to(REPOSITORY)), line) in known, text


def test_a_copy_of_the_version_that_differs_is_named(copy):
    assert versions.version(copy) == "7.8.9"
    file = copy / "clients/python/tandem/__init__.py"
    file.write_text(file.read_text().replace("7.8.9", "7.8.8"))
    with pytest.raises(versions.ReleaseError, match=r"tandem/__init__.py:\d+ \(7.8.8\)"):
        versions.version(copy)


def test_a_version_has_three_numbers(copy):
    with pytest.raises(versions.ReleaseError, match=r"'7.9', must be X.Y.Z"):
        versions.write("7.9", copy)


def test_the_changelog_has_an_entry_that_can_become_the_next_release():
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    today = datetime.date.today().isoformat()
    released = CHANGELOG.replace("[Unreleased]", f"[{versions.version()}] - {today}", 1)
    entry = build.changes(versions.version(), released)
    assert "- " in entry
    groups = set(re.findall(r"^### (.*)$", entry, re.MULTILINE))
    assert groups <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_a_tree_that_is_ready_is_released(copy):
    build.check("7.8.9", copy)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda copy: versions.write("7.8.8", copy), "the project's is 7.8.8"),
        (lambda copy: (copy / "new.txt").write_text(""), "not committed"),
        (lambda copy: git(copy, "tag", "v7.8.9"), "there is a tag v7.8.9"),
    ],
)
def test_a_tree_that_is_not_ready_is_refused(copy, change, says):
    change(copy)
    with pytest.raises(versions.ReleaseError, match=says):
        build.check("7.8.9", copy)


@pytest.mark.parametrize(
    "heading", ["[7.8.9]", "[Unreleased]", "[7.8.9] - 2026-01-02\n\n## [7.8.8]"]
)
def test_a_release_without_an_entry_and_a_date_is_refused(copy, heading):
    (copy / "CHANGELOG.md").write_text(f"## {heading}\n\n- A\n")
    git(copy, "commit", "-qam", "entry")
    with pytest.raises(versions.ReleaseError, match="no entry"):
        build.check("7.8.9", copy)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    return build.build_client(tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_the_contract_and_starts_where_it_is_installed(client):
    wheel, archive = client
    build.check_wheel(wheel, versions.version())
    protos = {file.stem for file in REPOSITORY.glob("proto/tandem/*/v1/*.proto")}
    with zipfile.ZipFile(wheel) as zipped, tarfile.open(archive) as packed:
        inside, sources = zipped.namelist(), packed.getnames()
    assert "server_config" in protos
    for names in (inside, sources):
        for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            found = {name.split("/")[-1].removesuffix(ending) for name in names if ending in name}
            assert protos <= found, ending
        assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in inside if "/tests/" in name]


def test_a_wheel_of_another_version_is_refused(client):
    with pytest.raises(versions.ReleaseError, match=r"says 'tandem \d"):
        build.check_wheel(client[0], "7.8.9")


def test_the_bill_of_materials_lists_what_the_client_needs(tmp_path):
    bill = json.loads(build.bill_of_client("7.8.9", tmp_path).read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/tandem-rl@7.8.9"
    needed = {one["name"]: one["version"] for one in bill["components"]}
    assert needed["grpcio"] == importlib.metadata.version("grpcio")
    assert "markdown-it-py" in needed, "rich needs it"
    assert "uvicorn" not in needed, "an extra needs it"


def test_the_packaged_chart_has_the_version_and_its_files(tmp_path):
    archive = build.package_chart(tmp_path)
    assert archive.name == f"tandem-{versions.version()}.tgz"
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    templates = {path.name for path in (build.CHART / "templates").iterdir()}
    assert templates == {name.split("/")[-1] for name in names if "/templates/" in name}
    assert {"tandem/Chart.yaml", "tandem/values.yaml", "tandem/values.schema.json"} <= set(names)


def test_checksums_are_those_of_sha256sum(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    build.write_checksums(tmp_path)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "b").write_text("c")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 1
