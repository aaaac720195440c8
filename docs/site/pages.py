"""Collects the pages of the documentation site (mkdocs.yml) from the repository, as they are.

Every page keeps its path, so its links are those that work in the repository. A link to a file of
the code leads to a copy of that file, a link to a folder to its README.md or to a list of its
files. Nothing is changed in the pages themselves.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
DECISIONS = "docs/adr"
# The target of a link without its anchor: "](target" or "](target#anchor".
_TARGET = re.compile(r"(?<=\]\()[^)#\s:]+(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the decisions below their entry of the navigation."""
    names = [name for name in _files() if re.match(rf"{DECISIONS}/\d+", name)]
    for section in config.nav:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and "Decisions" in entry:
                entry["Decisions"] = [entry["Decisions"], *names]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by the pages of the repository and what they link to."""
    known = _files()
    pages = [name for name in known if name.endswith(".md")]
    collected = {name: _copy(config, name) for name in pages}
    linked = {target for name in pages for target in _targets(name)}
    folders = {name for name in linked if (REPOSITORY / name).is_dir()}
    for folder in sorted(folders):
        inside = [name for name in known if name.startswith(f"{folder}/")]
        linked.update(inside)
        index = _index(folder)
        if index not in collected:
            collected[index] = _list(config, index, inside)
    for name in sorted(linked & set(known) - set(pages)):
        collected[name] = _copy(config, name)
        if Path(name).suffix not in (".svg", ".png"):
            # A browser shows plain text, and would save most other files.
            collected[name].dest_uri += ".txt"
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *collected.values()])


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Points links to folders at the page that stands for the folder."""
    start = posixpath.dirname(page.file.src_uri)

    def leads(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(start, found[0]))
        if not (REPOSITORY / path).is_dir():
            return found[0]
        return posixpath.relpath(_index(path), start or ".")

    return _TARGET.sub(leads, markdown)


def _files() -> list[str]:
    """Returns the paths of the repository's files, those that are not committed yet included."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return sorted(name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file())


def _copy(config: MkDocsConfig, name: str) -> File:
    # Not set, the level would leave out files whose names begin with a dot.
    level = InclusionLevel.INCLUDED
    return File.generated(config, name, abs_src_path=str(REPOSITORY / name), inclusion=level)


def _list(config: MkDocsConfig, index: str, names: Iterable[str]) -> File:
    folder = posixpath.dirname(index)
    links = (f"- [{name}]({name})" for name in (posixpath.relpath(n, folder) for n in names))
    text = "\n".join([f"# {folder}", "", *links])
    return File.generated(config, index, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def _targets(page: str) -> Iterator[str]:
    """Yields the paths in the repository that a page links to."""
    for target in _TARGET.findall((REPOSITORY / page).read_text()):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _index(folder: str) -> str:
    """Returns the path of the page that stands for a folder."""
    readme = f"{folder}/README.md"
    return readme if (REPOSITORY / readme).is_file() else f"{folder}/index.md"
