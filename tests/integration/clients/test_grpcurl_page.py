"""The commands of the page on grpcurl, in its order, on real servers with tiny models.

grpcurl.py stands for grpcurl. Addresses, paths and the token ids of SmolLM2 are replaced.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import harness
import pytest
import secured_server
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample

PAGE = harness.REPOSITORY / "docs/reference/grpcurl.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOKENS = {"6403": "5", "1980": "17", "253": "260", "655": "40"}


@dataclass
class Recipe:
    """A block of commands, with the answer that the page shows after it."""

    commands: str
    kind: str = ""
    answer: str = ""


def recipes() -> list[Recipe]:
    """The recipes of the page, in order."""
    found: list[Recipe] = []
    for kind, text in FENCE.findall(PAGE.read_text()):
        if kind == "sh":
            found.append(Recipe(text))
        else:
            assert not found[-1].kind, f"two answers to {found[-1].commands}"
            found[-1].kind, found[-1].answer = kind, text
    return found


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Path:
    """A folder in which to run commands; its bin/ has a grpcurl."""
    folder = tmp_path_factory.mktemp("grpcurl")
    program = folder / "bin" / "grpcurl"
    program.parent.mkdir()
    own = Path(__file__).with_name("grpcurl.py")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{own}" "$@"\n')
    program.chmod(0o755)
    (folder / "proto").symlink_to(harness.REPOSITORY / "proto")
    return folder


def start(commands: str, shell: Path, **options) -> subprocess.Popen:
    """Starts commands as a shell does, up to the first that fails."""
    environment = os.environ | {"PATH": f"{shell / 'bin'}:{os.environ['PATH']}"}
    bash = ["bash", "-euo", "pipefail", "-c", commands]
    return subprocess.Popen(bash, cwd=shell, env=environment, text=True, **options)


def run(recipe: Recipe, commands: str, shell: Path) -> str:
    """Runs the commands of a recipe; returns what they printed."""
    process = start(commands, shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    printed, problem = process.communicate(timeout=120)
    if recipe.answer.startswith("ERROR:\n  Code: InvalidArgument"):
        assert process.returncode == 64 + grpc.StatusCode.INVALID_ARGUMENT.value[0]
        return problem
    assert process.returncode == 0, commands + problem
    return printed


def watch(commands: str, shell: Path, trainer: TrainerClient) -> str:
    """Runs commands that watch while steps are trained, until they have printed a report."""
    file = shell / "watched"
    with file.open("w") as out:
        process = start(f"exec {commands}", shell, stdout=out)
    try:
        for step in range(1, 100):
            trainer.train_step(
                [SupervisedSample([5, 17], [40])],
                run_id="watched",
                step=step,
                expected_version=trainer.info().server.weights.version,
            )
            time.sleep(0.2)
            # A report ends with the brace of the outer object.
            if (text := file.read_text()).endswith("\n}\n"):
                return text
    finally:
        process.terminate()
        process.wait(30)
    raise AssertionError("no report came")


def messages(text: str) -> list:
    """The JSON values of a text, one after the other."""
    decoder, values = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def joined(answer: list) -> list:
    """The messages of an answer, with the streamed tokens of each request in one message.

    The server sends tokens that come while a message is under way together.
    """
    streams: dict[str, dict] = {}
    rest = []
    for message in answer:
        if "tokens" not in message:
            rest.append(message)
            continue
        tokens = message["tokens"]
        stream = streams.setdefault(tokens["requestId"], tokens | {"tokenIds": []})
        assert tokens.get("offset", 0) == len(stream["tokenIds"])
        stream["tokenIds"] += tokens["tokenIds"]
    return [{"tokens": stream} for stream in streams.values()] + rest


def difference(shown, answered, place: str = "") -> str | None:
    """The first place where the answer lacks what the page shows; None if there is none.

    Kinds of values are compared, and names of enums; of a list its first element.
    """
    if type(shown) is not type(answered) and not {type(shown), type(answered)} <= {int, float}:
        return f"{place}: {shown!r} is shown, the answer is {answered!r}"
    if isinstance(shown, dict):
        for key, value in shown.items():
            if key not in answered:
                return f"{place}.{key} is not in the answer"
            if found := difference(value, answered[key], f"{place}.{key}"):
                return found
    elif isinstance(shown, list) and shown and answered:
        return difference(shown[0], answered[0], f"{place}[0]")
    elif isinstance(shown, str) and re.fullmatch(r"[A-Z][A-Z_0-9]+", shown) and shown != answered:
        return f"{place}: {shown} is shown, the answer is {answered}"
    return None


def check(recipe: Recipe, printed: str) -> None:
    """Compares what the commands printed with the page."""
    if recipe.kind == "json":
        shown, answered = joined(messages(recipe.answer)), joined(messages(printed))
        assert len(shown) <= len(answered)
        for message in shown:
            differences = [difference(message, one) for one in answered]
            assert None in differences, f"{recipe.commands}{differences}"
    elif recipe.kind == "text":
        assert printed.rstrip() == recipe.answer.rstrip()


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ({"a": {"gone": 1}}, ".a.gone is not in the answer"),
        ({"a": {"b": "1"}}, ".a.b: '1' is shown, the answer is 1"),
        ({"state": "SERVING"}, ".state: SERVING is shown, the answer is NOT_SERVING"),
        ({"list": [{"c": 2}]}, ".list[0].c is not in the answer"),
        ({"a": {"b": 2}, "list": []}, None),
    ],
)
def test_a_wrong_answer_is_found(shown, found):
    answered = {"a": {"b": 1}, "state": "NOT_SERVING", "list": [{"b": 2}]}
    assert difference(shown, answered) == found


def is_secured(recipe: Recipe) -> bool:
    """Whether the recipe is of the section on TLS."""
    return "-cacert" in recipe.commands


def replace(text: str, places: dict[str, str]) -> str:
    """Returns a text with the page's addresses and paths replaced by the test's."""
    for page, own in places.items():
        text = text.replace(page, own)
    return re.sub(r"\b(6403|1980|253|655)\b", lambda found: TOKENS[found[1]], text)


def test_the_commands_of_the_page_give_its_answers(models, shell, tmp_path):
    with (
        harness.cluster(tmp_path, models, trainer={}, critic={}) as running,
        harness.trainer_client(running) as trainer,
    ):
        places = {
            "127.0.0.1:7701": running.rollouts[0].address,
            "127.0.0.1:7702": running.trainer.address,
            "127.0.0.1:7703": running.critic.address,
            "/var/lib/tandem": str(tmp_path),
        }
        for recipe in recipes():
            if is_secured(recipe):
                continue
            commands = replace(recipe.commands, places)
            if commands.endswith("/WatchSteps\n"):
                check(recipe, watch(commands, shell, trainer))
            else:
                check(recipe, run(recipe, commands, shell))
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_the_commands_with_tls_and_a_token_are_admitted(models, shell):
    secured = [recipe for recipe in recipes() if is_secured(recipe)]
    assert len(secured) == 2
    with secured_server.serve(models, shell / "certs") as address:
        places = {"rollout-0.tandem:7701": address}
        info, healthy = (run(one, replace(one.commands, places), shell) for one in secured)
        assert info.startswith("grpc.health.v1.Health\n")
        assert '"role": "rollout"' in info
        assert messages(healthy) == [{"status": "SERVING"}]
        (shell / "certs" / "user.token").write_text("other")
        refused = start(replace(secured[0].commands, places), shell, stderr=subprocess.PIPE)
        assert "not authenticated" in refused.communicate()[1]
        assert refused.returncode != 0
