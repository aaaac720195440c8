"""Builds everything of a release into dist/, and pushes nothing: `make release VERSION=X.Y.Z`.

dist/ holds the wheel and the source archive of the Python client, the Helm chart, the bills of
materials (CycloneDX) and SHA256SUMS. Images stay in the store of the tool that builds them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from versions import REPOSITORY, ReleaseError, version

CLIENT = REPOSITORY / "clients/python"
CHART = REPOSITORY / "deploy/kubernetes/chart"
DIST = REPOSITORY / "dist"


def main() -> int:
    """Checks, builds, and prints what is left to do by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="X.Y.Z, as in CMakeLists.txt and CHANGELOG.md")
    parser.add_argument("--no-images", action="store_true", help="build no container images")
    options = parser.parse_args()
    try:
        check(options.version)
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        built = build_client(DIST)
        check_wheel(built[0], options.version)
        bill_of_client(options.version, DIST)
        package_chart(DIST)
        if options.no_images:
            print("release: images: left out")
        else:
            build_images()
        write_checksums(DIST)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"release: nothing was pushed. To publish {options.version}:")
    print(f"  git tag -a v{options.version} -m 'Tandem {options.version}'")
    print(f"  git push origin v{options.version}")
    return 0


def check(wanted: str, root: Path = REPOSITORY) -> None:
    """Checks that the tree is what its version says.

    Raises:
        ReleaseError: another version, files that are not committed, no entry in CHANGELOG.md, or a
            tag that exists.
    """
    present = version(root)
    if wanted != present:
        hint = f"`make version VERSION={wanted}` changes it"
        raise ReleaseError(f"VERSION is {wanted}, the project's is {present}; {hint}")
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise ReleaseError(f"files are not committed:\n{changed}")
    if not changes(wanted, (root / "CHANGELOG.md").read_text()):
        raise ReleaseError(f"CHANGELOG.md has no entry `## [{wanted}] - YYYY-MM-DD` with changes")
    if _git(root, "tag", "--list", f"v{wanted}"):
        raise ReleaseError(f"there is a tag v{wanted}")


def changes(wanted: str, changelog: str) -> str:
    """Returns the entry of a version without its heading; "" if it has none or no date."""
    heading = rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d$"
    found = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def build_client(destination: Path) -> list[Path]:
    """Builds the wheel and the source archive of the Python client; returns both, wheel first.

    They come from a copy, which holds the modules of the contract: proto/ is not in the archive.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "tandem-rl"
        generated = ("*.pyc", "__pycache__", "*.egg-info", "build", "tests", ".pytest_cache")
        shutil.copytree(CLIENT, source, ignore=shutil.ignore_patterns(*generated))
        shutil.copy(REPOSITORY / "LICENSE", source)
        # The same bytes for the same commit.
        commit_time = _git(REPOSITORY, "log", "-1", "--format=%ct")
        subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", destination, source],
            env=os.environ | {"SOURCE_DATE_EPOCH": commit_time},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    built = [*destination.glob("*.whl"), *destination.glob("*.tar.gz")]
    for file in built:
        print(f"release: client: {file.name}")
    return built


def check_wheel(wheel: Path, wanted: str) -> None:
    """Installs a wheel in a fresh environment, which has its dependencies from this one.

    Raises:
        ReleaseError: the command says another version, or the package is not the wheel's.
    """
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch) / "bin/python"
        _run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
        purelib = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        dependencies = sysconfig.get_path("purelib")
        (Path(purelib) / "dependencies.pth").write_text(f"{dependencies}\n")
        said = _run(Path(scratch) / "bin/tandem", "--version")
        if said != f"tandem {wanted}":
            raise ReleaseError(f"{wheel.name}: `tandem --version` says {said!r}")
        used = _run(python, "-c", "import tandem.rpc.client; print(tandem.rpc.client.__file__)")
        if not Path(used).is_relative_to(purelib):
            raise ReleaseError(f"{wheel.name}: tandem.rpc.client comes from {used}")
    print(f"release: client: {said} starts from the wheel")


def bill_of_client(wanted: str, destination: Path) -> Path:
    """Writes the bill of materials of the client: its dependencies, as they are pinned here."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    def component(name: str, number: str) -> Component:
        purl = PackageURL("pypi", None, name, number)
        return Component(name=name, version=number, purl=purl, bom_ref=str(purl))

    client = component("tandem-rl", wanted)
    client.type = ComponentType.APPLICATION
    client.licenses = [LicenseFactory().make_from_string("Apache-2.0")]
    needed = [component(*one) for one in sorted(dependencies("tandem-rl").items())]
    bom = Bom(metadata=BomMetaData(component=client), components=needed)
    bom.register_dependency(client, needed)
    file = destination / f"tandem_rl-{wanted}.cdx.json"
    writer = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
    file.write_text(writer.output_as_string(indent=2) + "\n")
    print(f"release: client: {file.name} ({len(needed)} packages)")
    return file


def dependencies(package: str) -> dict[str, str]:
    """Returns the version of every package that one needs without its extras, by name."""
    found: dict[str, str] = {}
    waiting = [package]
    while waiting:
        for line in distribution(waiting.pop()).requires or ():
            need = Requirement(line)
            if need.name in found or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            found[need.name] = distribution(need.name).version
            waiting.append(need.name)
    return found


def package_chart(destination: Path) -> Path:
    """Packages the Helm chart."""
    import helm_python

    archive = Path(helm_python.package(CHART, destination=destination))
    print(f"release: chart: {archive.name}")
    return archive


def build_images() -> None:
    """Builds the container images and takes their bills of materials.

    Raises:
        ReleaseError: no tool that builds images is there.
    """
    if not any(map(shutil.which, ("docker", "buildah", "podman"))):
        raise ReleaseError("images: none of docker, buildah and podman is there; IMAGES=no goes on")
    bills = REPOSITORY / "build/images"
    shutil.rmtree(bills, ignore_errors=True)
    subprocess.run(["make", "--no-print-directory", "images"], cwd=REPOSITORY, check=True)
    for bill in sorted(bills.glob("*.cdx.json")):
        shutil.copy(bill, DIST / f"image-{bill.name}")


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS, which `sha256sum --check` reads."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(folder.iterdir())
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
    print(f"release: SHA256SUMS: {len(lines)} files")


def _git(root: Path, *arguments: str) -> str:
    return _run("git", "-C", root, *arguments)


def _run(*command: str | Path) -> str:
    # Not this repository's package instead of the installed one.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd="/"
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
