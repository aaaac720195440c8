"""The documentation site builds without a warning, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml
from page_blocks import REPOSITORY, pages

# A dead link to a page, to an anchor and to a file.
DEAD = ("nowhere.md", "metrics.md#nowhere", "../../common/nowhere.h", "../../tests/nowhere/")


def build(folder, *options):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, *options], cwd=REPOSITORY, env=quiet, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_site(site):
    for page in pages():
        html = re.sub(r"(README)?\.md$", lambda m: "index.html" if m[1] else ".html", page)
        assert (site / html).is_file(), page


def test_the_first_page_is_the_readme_with_its_picture(site):
    text = (site / "index.html").read_text()
    assert "Tandem Reinforcement Learning trains" in text
    assert 'src="docs/images/trajectories.svg"' in text
    assert (site / "docs/images/trajectories.svg").is_file()


def test_links_to_code_and_folders_lead_to_what_they_name(site):
    text = (site / "index.html").read_text() + (site / "docs/operations/cuda.html").read_text()
    for target in (
        "examples/scripts/loop.py.txt",
        "docs/adr/index.html",
        "../../common/ops/index.html",
    ):
        assert f'href="{target}"' in text, target
    assert (site / "common/ops/index.html").is_file()


def test_no_page_loads_anything_from_another_host(site):
    loads = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?https?://[^>]*>")
    found = {file.name: loads.findall(file.read_text()) for file in site.rglob("*.html")}
    assert found
    assert {name: tags for name, tags in found.items() if tags} == {}


@pytest.mark.parametrize("target", DEAD)
def test_a_dead_link_is_found(target, tmp_path):
    """The link stands at the end of a page, put there while the site is built."""
    (tmp_path / "dead_link.py").write_text(
        "def on_page_markdown(markdown, page, **_):\n"
        "    if page.file.src_uri == 'docs/reference/limits.md':\n"
        f"        return markdown + '[dead]({target})'\n"
    )
    config = {
        "INHERIT": f"{REPOSITORY}/mkdocs.yml",
        "docs_dir": f"{REPOSITORY}/docs",
        "hooks": [f"{REPOSITORY}/docs/site/pages.py", f"{tmp_path}/dead_link.py"],
        "watch": [],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    built = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert built.returncode != 0
    assert target in built.stderr
