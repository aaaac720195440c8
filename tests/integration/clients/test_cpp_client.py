"""The C++ client of examples/cpp_client, built on its own, calls real servers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import harness
import pytest
import secured_server
from tandem.rpc.requests import Prompt
from tandem.rpc.wire import from_tensor

SOURCE = harness.REPOSITORY / "examples/cpp_client"
PROMPT = [5, 17, 260, 40]


@pytest.fixture(scope="module")
def program() -> Path:
    """The program, built as its CMakeLists.txt says outside of the project's build."""
    build = Path(os.environ.get("TANDEM_BUILD_DIR", "build/release")).resolve() / "cpp_client"
    options = ["-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    for command in (
        # Another checkout may have used the folder; ccache has what it compiled.
        ["cmake", "--fresh", "-S", SOURCE, "-B", build, "-G", "Ninja", *options],
        ["cmake", "--build", build, "-j", "2"],
    ):
        done = subprocess.run(command, cwd=harness.REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "tandem-cpp-client"


def run(program, address, *ids, check=0, **variables):
    command = [program, address, *map(str, ids)]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == check, done.stdout + done.stderr
    return done


def test_it_prints_the_tokens_by_author_and_the_scores(program, pair, rollout):
    printed = run(program, pair.rollouts[0].address, *PROMPT).stdout.splitlines()
    [[expected]] = rollout.generate([Prompt(PROMPT, sampling={"max_tokens": 16})])
    ids, authors = [], []
    for author, tokens in re.findall(r"\[(senior|junior)\] ([\d ]+)", printed[2]):
        ids += map(int, tokens.split())
        authors += [int(author == "senior")] * len(tokens.split())
    assert ids == harness.tokens(expected)
    assert authors == harness.mask(expected)
    assert printed[0] == "health: SERVING"
    model = rollout.info().server.model
    assert printed[1] == f"model: llama, {model.num_token_ids} token ids, version 0"
    assert printed[3] == f"response: {len(ids)} tokens, {sum(authors)} by the senior"
    scores = rollout.score([(PROMPT + ids, 1)], senior=True, junior=True).sequences[0]
    sums = [float(number) for number in re.findall(r"-[\d.]+", printed[4])]
    for value, tensor in zip(sums, (scores.senior_logprobs, scores.junior_logprobs), strict=True):
        assert value == pytest.approx(from_tensor(tensor).sum(), rel=1e-4)


def test_it_prints_the_field_of_a_bad_request(program, pair):
    said = run(program, pair.rollouts[0].address, 5, 99999, check=1).stderr
    refused, scored = said.splitlines()
    assert refused.startswith("Generate: prompt-0: ")
    assert "code 3, field prompt_token_ids[1]]" in refused
    assert scored.startswith("Score: ")
    assert "code 3, field sequences[0].token_ids[1]]" in scored


def test_it_prints_the_reason_of_a_failure(program, models, tmp_path):
    alone = {"junior_model": "", "tandem": {"enabled": False}}
    with harness.cluster(tmp_path, models, rollout=alone) as running:
        said = run(program, running.rollouts[0].address, *PROMPT, check=1)
    assert "response: " in said.stdout
    assert said.stderr.endswith("[code 9, field junior, reason NO_JUNIOR]\n")


def test_a_server_that_is_not_there_and_wrong_usage_are_told(program, tmp_path):
    assert "[code 14]" in run(program, "127.0.0.1:1", 5, check=1).stderr
    assert "usage: " in run(program, "127.0.0.1:1", check=2).stderr
    assert "TOKEN_ID: 5x is no token id" in run(program, "127.0.0.1:1", "5x", check=2).stderr
    missing = {"TANDEM_CA_FILE": str(tmp_path / "none.pem")}
    said = run(program, "127.0.0.1:1", 5, check=2, **missing).stderr
    assert said == f"TANDEM_CA_FILE: cannot read {tmp_path}/none.pem\n"


def test_it_speaks_tls_with_its_certificate_and_its_token(program, models, tmp_path):
    variables = {
        "TANDEM_CA_FILE": str(tmp_path / "ca.crt"),
        "TANDEM_CERTIFICATE_FILE": str(tmp_path / "client.crt"),
        "TANDEM_PRIVATE_KEY_FILE": str(tmp_path / "client.key"),
        "TANDEM_TOKEN_FILE": str(tmp_path / "user.token"),
    }
    with secured_server.serve(models, tmp_path) as address:
        assert "response: " in run(program, address, 5, **variables).stdout
        without_token = variables | {"TANDEM_TOKEN_FILE": ""}
        said = run(program, address, 5, check=1, **without_token)
        assert said.stderr.startswith("GetServerInfo: ")
        assert "[code 16" in said.stderr
        assert "[code 14]" in run(program, address, 5, check=1).stderr
