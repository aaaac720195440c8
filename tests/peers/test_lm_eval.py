"""lm-eval, unchanged, on `tandem serve-openai`: the command of its page on small tasks.

Its numbers are compared with those that the rollout server gives without HTTP.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "tests/integration"))

import harness  # noqa: E402
from tandem.cluster.local import LocalCluster  # noqa: E402
from tandem.models.tokenizer import TextCodec  # noqa: E402
from tandem.rpc.requests import Prompt  # noqa: E402
from tandem.rpc.wire import from_tensor  # noqa: E402

CHOICES = [" three", " five", " a number"]
ROWS = [
    {"question": "the sum of two and three is", "choices": CHOICES, "answer": 1},
    {"question": "one two", "choices": CHOICES, "answer": 0},
    {"question": "a word and", "choices": CHOICES, "answer": 2},
]
TASKS = {
    "choosing": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> harness.Models:
    """Tiny random models."""
    return harness.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def running(
    models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A rollout server."""
    with harness.cluster(tmp_path_factory.mktemp("cluster"), models) as running:
        yield running


@pytest.fixture(scope="module")
def url(running: LocalCluster) -> Iterator[str]:
    """The base URL of `tandem serve-openai`."""
    command = [sys.executable, "-m", "tandem", "serve-openai", "--json", "--port", "0"]
    options = ["--rollout", running.rollouts[0].address, "--model-name", "SmolLM2-135M-Instruct"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["base_url"]
        finally:
            process.terminate()


def write_tasks(folder: Path) -> None:
    """Writes the tasks with their rows, as lm-eval's --include_path reads them."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, own in TASKS.items():
        task = own | {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            # The choices begin with their space.
            "target_delimiter": "",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))


def samples_of(folder: Path, task: str) -> list[dict]:
    """The samples that lm-eval logged, in the order of the rows."""
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    return sorted(harness.json_lines(file), key=lambda sample: sample["doc_id"])


def test_the_command_of_the_page_scores_and_generates(url, running, models, tmp_path):
    write_tasks(tmp_path)
    page = (REPOSITORY / "docs/guides/apis/openai.md").read_text()
    [command] = re.findall(r"^lm_eval run .*?(?=^```$)", page, re.MULTILINE | re.DOTALL)
    places = {
        "http://127.0.0.1:8000/v1": url,
        "models/SmolLM2-135M-Instruct": str(models.senior),
        "hellaswag": ",".join(TASKS),
        "max_length=2048": "max_length=128",
    }
    for place, own in places.items():
        assert place in command
        command = command.replace(place, own)
    lm_eval, *arguments = shlex.split(command.replace("\\\n", ""))
    logged = ["--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"]
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [Path(sys.executable).with_name(lm_eval), *arguments, *logged],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    codec = TextCodec(models.tokenizer)
    with harness.rollout_client(running) as rollout:
        for sample, row in zip(samples_of(tmp_path / "out", "choosing"), ROWS, strict=True):
            question = codec.encode(row["question"])
            for choice, ([logprob, _], *_) in zip(CHOICES, sample["resps"], strict=True):
                whole = codec.encode(row["question"] + choice)
                reply = rollout.score([(whole, len(question))])
                expected = from_tensor(reply.sequences[0].senior_logprobs).sum()
                assert float(logprob) == pytest.approx(expected, abs=1e-3)
        for sample, row in zip(samples_of(tmp_path / "out", "writing"), ROWS, strict=True):
            prompt = Prompt(
                codec.encode(row["question"]),
                sampling={"max_tokens": 8, "temperature": 0},
                tandem={"enabled": False},
            )
            [[response]] = rollout.generate([prompt])
            text = codec.decode(response.response_token_ids).partition("\n\n")[0]
            assert sample["resps"] == [[text]]
