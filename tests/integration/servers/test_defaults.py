"""The reference page, the contract and the client name the defaults that the servers fill in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import harness
import pytest
import yaml
from tandem._proto.types.v1.sampling_pb2 import SamplingParams
from tandem.cluster.local import find_binary
from tandem.rpc.calls import CriticCalls, RolloutCalls, TrainerCalls
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import Prompt
from tandem.settings.run import SamplingSettings

PAGE = (harness.REPOSITORY / "docs/reference/configuration.md").read_text()
# Overrides to resolve each role with: a strategy's fields have defaults when it is chosen.
OVERRIDES = {
    "rollout": [[]],
    "trainer": [[f"strategy.name={name}"] for name in ("single", "zero", "megatron")],
    "critic": [[f"strategy.name={name}"] for name in ("single", "zero", "megatron")],
}


def documented(role: str) -> dict[str, str]:
    """The defaults that the page gives the settings of a server, by dotted path."""
    settings = {}
    for section in PAGE.split("\n## ")[1:]:
        title = re.match(r".*", section).group().strip("`")
        if title.startswith("tandem-") and title != f"tandem-{role}-server":
            continue
        for path, default in re.findall(r"^\| `(\S+)` \| .+? \| `(.+?)` \|", section, re.M):
            # "7701 rollout, 7702 trainer, 7703 critic"
            of_role = re.search(rf"(\d+) {role}\b", default)
            settings[path] = of_role.group(1) if of_role else default
    return settings


def resolved(role: str, model: Path, overrides: list[str]) -> dict[str, Any]:
    """The settings that a server prints with --check-config, by dotted path."""
    field = "senior_model" if role == "rollout" else "model"
    extra = ["untie_embeddings=true"] if role == "critic" else []
    command = [find_binary(f"tandem-{role}-server"), "--check-config", f"{field}={model}"]
    done = subprocess.run([*command, *extra, *overrides], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def flat(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {path: value}
        inner = [flat(v, f"{path}.{k}" if path else k) for k, v in value.items()]
        return {path: v for settings in inner for path, v in settings.items()}

    return flat(yaml.safe_load(done.stdout), "")


def same(value: Any, text: str) -> bool:
    """Whether a value equals the text of the page; numbers are compared as numbers."""
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value).lower() == text


@pytest.mark.parametrize("role", OVERRIDES)
def test_the_page_has_the_defaults_that_the_server_fills_in(role: str, models: harness.Models):
    found = {}
    for overrides in OVERRIDES[role]:
        found |= resolved(role, models.senior, overrides)
    defaults = documented(role)
    wrong = {
        path: (found.get(path), default)
        for path, default in defaults.items()
        if path in found and not same(found[path], default)
    }
    for given in ("strategy.name", "untie_embeddings"):  # set by this test
        wrong.pop(given, None)
    if role == "rollout":  # has those of senior and junior instead, and refuses these
        for setting in ("compute.weight_dtype", "compute.activation_dtype"):
            wrong.pop(setting, None)
    assert wrong == {}
    assert len(defaults.keys() & found.keys()) > 20


def test_a_run_draws_tokens_with_the_servers_defaults(rollout: RolloutClient):
    """The client sends its own copies with every prompt, and a run records them."""
    # The server has no default for the length.
    own = SamplingSettings().model_dump(exclude={"max_tokens"})
    prompt = Prompt(token_ids=[2, 3], sampling={"max_tokens": 1})
    [[trajectory]] = rollout.generate([prompt])
    fields = {field.name for field in SamplingParams.DESCRIPTOR.fields} - {"max_tokens"}
    filled_in = {name: getattr(trajectory.sampling, name) for name in fields}
    lists = {name: list(filled_in[name]) for name in ("stop_token_ids", "stop")}
    assert own == filled_in | lists


def commented(file: str, message: str) -> dict[str, str]:
    """The default in the comment of every field of a message that has one there."""
    text = (harness.REPOSITORY / "proto/tandem" / file).read_text()
    body = re.search(rf"^message {message} {{\n(.*?)^}}", text, re.M | re.S).group(1)
    found = {}
    for comment, field in re.findall(r"((?:^ +//.*\n)+) +(?:\w+ )?\w+ (\w+) =", body, re.M):
        words = " ".join(comment.replace("//", "").split())
        if default := re.search(r"\b[Dd]efault:? (false|true|\d[\d.e-]*)", words):
            found[field] = default.group(1).rstrip(".")
    return found


def test_the_contract_tells_the_defaults_of_a_request(
    rollout: RolloutClient, trainer: TrainerClient
):
    objective = commented("trainer/v1/objective.proto", "PolicyObjective")
    sampling = commented("types/v1/sampling.proto", "SamplingParams")
    assert len(objective) > 20
    assert sampling.keys() == {"temperature", "top_k", "top_p", "min_p", "ignore_eos"}
    in_force = trainer.check_objective({})
    [[trajectory]] = rollout.generate([Prompt(token_ids=[2, 3], sampling={"max_tokens": 1})])
    for filled_in, told in ((in_force, objective), (trajectory.sampling, sampling)):
        values = {name: getattr(filled_in, name) for name in told}
        assert {name: value for name, value in values.items() if not same(value, told[name])} == {}


@pytest.mark.parametrize("calls", [RolloutCalls, TrainerCalls, CriticCalls])
def test_the_client_calls_the_address_at_which_the_server_listens(calls, models: harness.Models):
    server = resolved(calls.role, models.senior, [])
    assert calls.default_address == f"{server['server.host']}:{server['server.grpc_port']}"
