"""Tiny random models, clusters of the real servers around them, and runs against those."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1 import trajectory_pb2
from tandem.cluster.local import LocalCluster, Server, find_binary
from tandem.metrics import CLOCK_KEYS
from tandem.rpc.author_schedule import authorship_mask
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.requests import Prompt
from tandem.rpc.transport import Connection
from tandem.rpc.wire import from_tensor, tandem_record
from tandem.run_directory.directory import RunDirectory
from tandem.run_directory.trajectories.files import read_records, step_file
from tandem.session.connections import addresses_of
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import RunSettings
from tandem.training.loop import train
from tandem.utils.authors import ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]
STRATEGIES = ("bernoulli", "chunk", "alternating", "sentence", "word", "turn")
# One configuration of each strategy.
TANDEM = {
    "bernoulli": {"selection_strategy": "bernoulli", "prob_senior": 0.5},
    "chunk": {"selection_strategy": "chunk", "chunk_size": 3},
    "alternating": {"selection_strategy": "alternating"},
    "sentence": {"selection_strategy": "sentence"},
    "word": {"selection_strategy": "word", "prob_senior": 0.5, "max_gap_tokens": 4},
    "turn": {"selection_strategy": "turn"},
}
SAMPLING = {"max_tokens": 24, "temperature": 1.0}

CORPUS = [
    "one two three four five six seven eight nine ten\n\neleven twelve",
    "the sum of two and three is five\n\nthe sum of four and four is eight\n\n",
    "a question and an answer\n\na word and a number 1 2 3 4 5 6 7 8 9 0",
    # Frequent enough to become a token: the end of a sentence.
    *["\n\n"] * 20,
]


@dataclass(frozen=True)
class Models:
    """Directories of models; senior and junior have one tokenizer, the third has its own."""

    senior: Path
    junior: Path
    other_vocabulary: Path

    @property
    def tokenizer(self) -> Path:
        """Directory with the tokenizer of senior and junior."""
        return self.senior


def make_models(directory: Path) -> Models:
    """Makes two Llamas of odd shape with different weights, and one with another vocabulary."""
    models = Models(directory / "senior", directory / "junior", directory / "other")
    _make_model(models.senior, seed=1, vocabulary=300)
    _make_model(models.junior, seed=2, vocabulary=300)
    _make_model(models.other_vocabulary, seed=3, vocabulary=290)
    return models


def _make_model(directory: Path, seed: int, vocabulary: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
        # Large enough for peaked, quite different distributions.
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


def sections(
    models: Models,
    *,
    rollout: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    critic: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Sections of a cluster file by role, with changes to each section.

    There is always a rollout section; the trainer and the critic have one unless they are None.
    """
    common = {"compute": {"num_threads": 1}, "max_model_len": 128}
    learner = common | {"model": str(models.senior), "optimizer": {"learning_rate": 1e-3}}
    both = {"senior_model": str(models.senior), "junior_model": str(models.junior)}
    servers = {"rollout": common | both | dict(rollout or {})}
    if trainer is not None:
        servers["trainer"] = learner | dict(trainer)
    if critic is not None:
        servers["critic"] = learner | {"untie_embeddings": True} | dict(critic)
    return servers


def openai_server(rollout: str, errors: IO[str] | None = None) -> AbstractContextManager[str]:
    """Runs `tandem serve-openai` on a rollout server; yields its base URL."""
    return _web_server("serve-openai", ["--rollout", rollout], errors)


def tinker_server(
    running: LocalCluster, checkpoints: Path, *options: str, errors: IO[str] | None = None
) -> AbstractContextManager[str]:
    """Runs `tandem serve-tinker` on a trainer and a rollout server; yields its base URL."""
    servers = ["--trainer", running.trainer.address, "--rollout", running.rollouts[0].address]
    places = ["--checkpoints", str(checkpoints)]
    return _web_server("serve-tinker", [*servers, *places, *options], errors)


@contextmanager
def _web_server(name: str, options: Sequence[str], errors: IO[str] | None) -> Iterator[str]:
    command = [sys.executable, "-m", "tandem", name, "--json", "--port", "0"]
    with subprocess.Popen(
        [*command, "--model-name", "senior", *options],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["base_url"]
        finally:
            process.terminate()


@contextmanager
def cluster(
    directory: Path,
    models: Models,
    *,
    rollouts: int = 1,
    rollout: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    critic: Mapping[str, Any] | None = None,
    certs: Path | None = None,
) -> Iterator[LocalCluster]:
    """Starts real servers on free ports, configured by sections().

    With `certs`, a directory of `tandem certs`, over TLS with tokens.
    """
    servers: dict[str, Any] = sections(models, rollout=rollout, trainer=trainer, critic=critic)
    servers["rollout"] = [servers["rollout"]] * rollouts
    config = ClusterSettings(directory=directory, start_timeout_seconds=60, certs=certs, **servers)
    with LocalCluster(config) as running:
        yield running


def run_settings(
    directory: Path, models: Models, running: LocalCluster | None, **changes: Any
) -> RunSettings:
    """Settings of a short run whose reward varies within a group; writes its rows and its reward.

    With `running` None, `changes` must name the servers.
    """
    rows = directory / "rows.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rows.write_text("".join(json.dumps({"prompt": f"the sum of {w} and"}) + "\n" for w in words))
    reward = directory / "reward.py"
    reward.write_text(
        "def reward(prompt, response, **row):\n"
        "    return (len(response) + 3 * response.count('e')) / 10\n"
    )
    values: dict[str, Any] = {
        "run_dir": str(directory / "run"),
        "steps": 3,
        "tokenizer": str(models.tokenizer),
        "data": {"jsonl": str(rows)},
        "reward": {"function": f"{reward}:reward"},
        "batch": {"prompts_per_step": 3, "samples_per_prompt": 4},
        "sampling": {"max_tokens": 12},
        "tandem": TANDEM["word"],
    }
    if running is not None:
        values["servers"] = addresses_of(running).model_dump()
        values["credentials"] = running.credentials.record()
    return loading.validate(RunSettings, values | changes, "test")


def run_training(
    config: RunSettings,
    *,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
    resume: bool = False,
) -> Path:
    """Does what `tandem train` does, in this process; returns the run directory."""
    with RunDirectory.open(config, "train", resume=resume) as run, open_session(config) as session:
        train(session, run, on_step)
        return run.path


def run_on(
    running: LocalCluster,
    models: Models,
    directory: Path,
    *,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
    resume: bool = False,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Trains on running servers; returns metrics_without_clock() of the run."""
    config = run_settings(directory, models, running, **changes)
    return metrics_without_clock(run_training(config, on_step=on_step, resume=resume))


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def trajectories(run: Path, step: int) -> list[dict[str, Any]]:
    """The records of a step's trajectories."""
    return read_records(step_file(run, step))


def metrics_without_clock(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl without the keys that a clock decides."""
    return [
        {key: value for key, value in line.items() if key not in CLOCK_KEYS}
        for line in json_lines(run / "metrics.jsonl")
    ]


def assert_metrics_close(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Asserts that two layouts' metrics of a run are alike."""
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert line.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, float) and key != "policy/micro_batches":
                np.testing.assert_allclose(line[key], value, rtol=1e-3, atol=1e-4, err_msg=key)


def prompts(
    count: int, tandem: Mapping[str, Any], *, sampling: Mapping[str, Any] = SAMPLING, **rest: Any
) -> list[Prompt]:
    """Prompts of different lengths whose ids are well inside the vocabulary."""
    rng = np.random.default_rng(0)
    return [
        Prompt(
            token_ids=rng.integers(2, 280, size=3 + 4 * index).tolist(),
            seed=1000 + index,
            sampling=sampling,
            tandem=tandem,
            **rest,
        )
        for index in range(count)
    ]


def flat(
    groups: Sequence[Sequence[trajectory_pb2.Trajectory]],
) -> list[trajectory_pb2.Trajectory]:
    """The samples of all groups in one list."""
    return [trajectory for group in groups for trajectory in group]


def tokens(trajectory: trajectory_pb2.Trajectory) -> list[int]:
    """Token ids of the response."""
    return list(trajectory.response_token_ids)


def mask(trajectory: trajectory_pb2.Trajectory) -> list[int]:
    """Author of every response token: 1 the senior, 0 the junior."""
    return list(trajectory.authorship_mask)


def logprobs(trajectory: trajectory_pb2.Trajectory, model: str) -> np.ndarray:
    """Log-probs of the response under "senior", "junior" or the "author"; NaN: not computed."""
    author = from_tensor(trajectory.author_logprobs)
    if model == "author":
        return author
    other = np.full_like(author, np.nan)
    if trajectory.HasField("other_logprobs"):
        other = from_tensor(trajectory.other_logprobs)
    mine = np.frombuffer(trajectory.authorship_mask, np.uint8) == (model == "senior")
    return np.where(mine, author, other)


def response_bytes(trajectory: trajectory_pb2.Trajectory) -> bytes:
    """Returns the bytes of a trajectory without the senior's versions and the marks of drafts."""
    copy = trajectory_pb2.Trajectory()
    copy.CopyFrom(trajectory)
    copy.ClearField("senior_versions")
    copy.ClearField("accepted_draft_mask")
    return copy.SerializeToString(deterministic=True)


def derived_mask(
    trajectory: trajectory_pb2.Trajectory, info: rollout_pb2.GetServerInfoResponse
) -> list[int]:
    """Returns the authors that follow from the trajectory's own record and the server's sets."""
    tandem = tandem_record(trajectory.tandem)
    defaults = {
        "sentence": info.sentence_boundary_token_ids,
        "word": info.word_boundary_token_ids,
    }
    return authorship_mask(
        tokens(trajectory),
        tandem,
        trajectory.seed,
        trajectory.sample_index,
        defaults.get(tandem["selection_strategy"], ()),
        environment=[t for t, author in enumerate(mask(trajectory)) if author == ENVIRONMENT],
    )


def assert_scored(
    trajectory: trajectory_pb2.Trajectory, score: rollout_pb2.SequenceScores, atol: float
) -> None:
    """Fails unless the log-probs of what models wrote are those of Score, under both models."""
    drawn = np.array(mask(trajectory)) != ENVIRONMENT
    for model in ("senior", "junior"):
        np.testing.assert_allclose(
            from_tensor(getattr(score, f"{model}_logprobs"))[drawn],
            logprobs(trajectory, model)[drawn],
            rtol=0,
            atol=atol,
        )


def assert_same_bits(
    ours: Sequence[trajectory_pb2.Trajectory], theirs: Sequence[trajectory_pb2.Trajectory]
) -> None:
    """Fails unless responses, authors and all numbers are the same; versions may differ."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (tokens(a), mask(a)) == (tokens(b), mask(b))
        assert response_bytes(a) == response_bytes(b)


def reference_logprobs(
    directory: Path, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of the response by transformers, in float32, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    if directory not in _LOADED:
        _LOADED[directory] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = _LOADED[directory](ids).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits / temperature, -1)
    return rows[torch.arange(len(response)), torch.tensor(list(response))].numpy()


_LOADED: dict[Path, Any] = {}


def batch_metrics(
    trajectories: Sequence[trajectory_pb2.Trajectory],
    rewards: Sequence[float],
    sentence_ends: Collection[int],
) -> dict[str, float]:
    """Metrics of rewards, authorship and sizes of a batch, by docs/reference/metrics.md."""
    masks = [np.array(mask(trajectory)) for trajectory in trajectories]
    responses = [tokens(trajectory) for trajectory in trajectories]
    count = sum(map(len, responses))
    senior = sum(int(authors.sum()) for authors in masks) / count
    sentences = sum(
        sum(token in sentence_ends for token in ids) + (ids[-1] not in sentence_ends)
        for ids in responses
    )
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards, ddof=1)),
        "tandem/senior_token_fraction": senior,
        "tandem/junior_token_fraction": 1.0 - senior,
        "tandem/switches_per_seq": float(np.mean([abs(np.diff(m)).sum() for m in masks])),
        "tandem/tokens_per_sent": count / sentences,
        "tokens/prompt": sum(len(trajectory.prompt_token_ids) for trajectory in trajectories),
        "tokens/response": count,
    }


def block_bytes(model: Path) -> int:
    """Returns the bytes of 64 tokens in the float32 KV cache of a model."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] == "deepseek_v3":
        latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return 64 * config["num_hidden_layers"] * latent * 4
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    return 64 * 2 * layers * heads * head_dim * 4


def wait_until(condition: Callable[[], bool], seconds: float = 30, pause: float = 0.02) -> None:
    """Returns when the condition holds; fails if it does not within `seconds`.

    It is tried again every `pause` seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds} s"
        time.sleep(pause)


def restart(server: Server) -> None:
    """Kills a server and starts its command again at its address, as a supervisor does."""
    server.process.kill()
    server.process.wait()
    port = server.address.rpartition(":")[2]
    binary = find_binary(f"tandem-{server.role}-server")
    server.process = subprocess.Popen(
        [binary, "--config", server.log.with_suffix(".yaml"), f"server.grpc_port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with Connection(server.address) as connection:
        wait_until(lambda: connection.health() == "SERVING")


def metrics_text(server: Server) -> str:
    """The text of a server's metrics endpoint."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as reply:
        return reply.read().decode()


def gauge(server: Server, name: str) -> float:
    """The value of a metric; `name` has its labels, if it has any."""
    found = re.search(rf"^{name}(?:{{}})? (\S+)$", metrics_text(server), re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return float(found[1])


def weights(directory: Path) -> dict[str, np.ndarray]:
    """Tensors of an exported model by name, converted to float32."""
    from safetensors import safe_open

    result = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                result[name] = opened.get_tensor(name).float().numpy()
    return result


def rollout_client(running: LocalCluster, index: int = 0) -> RolloutClient:
    """A client of one rollout server."""
    address = running.rollouts[index].address
    return RolloutClient(address, timeout_seconds=60, credentials=running.credentials)


def trainer_client(running: LocalCluster) -> TrainerClient:
    """A client of the trainer."""
    address = running.trainer.address
    return TrainerClient(address, timeout_seconds=60, credentials=running.credentials)


def critic_client(running: LocalCluster) -> CriticClient:
    """A client of the critic."""
    address = running.critic.address
    return CriticClient(address, timeout_seconds=60, credentials=running.credentials)
