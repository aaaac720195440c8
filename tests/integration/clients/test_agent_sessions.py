"""Sessions of `tandem serve-openai` on real servers: exact ids, authors, log-probs, and a step."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import harness
import numpy as np
import openai
import pytest
from harness import assert_scored, derived_mask, flat, logprobs, mask, tokens
from tandem.models.tokenizer import TextCodec
from tandem.pool.rollout_pool import response_to_score
from tandem.rpc.requests import Prompt, ResponseSoFar
from tandem.rpc.wire import from_tensor
from tandem.sessions import SessionsClient, policy_samples

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TANDEM = {"selection_strategy": "word", "prob_senior": 0.5, "max_gap_tokens": 4}
TURNS = 3
# The tolerance of the other tests of log-probabilities on these models (numerics of the laws).
ATOL = 5e-5


@pytest.fixture(scope="module")
def talking(models, tmp_path_factory):
    """The models, with a chat template whose turns end with a special token."""
    place = tmp_path_factory.mktemp("talking")
    copies = harness.Models(place / "senior", place / "junior", models.other_vocabulary)
    for name in ("senior", "junior"):
        shutil.copytree(getattr(models, name), place / name)
    (copies.senior / "chat_template.jinja").write_text(TEMPLATE)
    return copies


@pytest.fixture(scope="module")
def cluster(talking, tmp_path_factory):
    """A rollout server and a trainer."""
    place, longer = tmp_path_factory.mktemp("sessions"), {"max_model_len": 256}
    with harness.cluster(place, talking, rollout=longer, trainer=longer) as running:
        yield running


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The error stream of the command's server."""
    return tmp_path_factory.mktemp("log") / "stderr"


@pytest.fixture(scope="module")
def url(cluster, log) -> Iterator[str]:
    """The base URL of the command's server."""
    with (
        log.open("w") as errors,
        harness.openai_server(cluster.rollouts[0].address, errors) as url,
    ):
        yield url


@pytest.fixture
def rollout(cluster):
    with harness.rollout_client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def codec(talking):
    return TextCodec(talking.senior)


def call(client, name, messages, **fields):
    """One call of an agent; returns its raw answer."""
    return client.chat.completions.with_raw_response.create(
        **{"model": "senior", "max_completion_tokens": 12} | fields,
        messages=messages,
        extra_headers={"X-Session-Id": name},
    )


def episode(url, name, *, turns=TURNS, between=lambda turn: None, stream=False, **fields):
    """An agent's episode; returns the texts of its turns."""
    messages, texts = [{"role": "user", "content": f"one {name}"}], []
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        for turn in range(turns):
            between(turn)
            answer = call(client, name, messages, stream=stream, **fields)
            assert answer.headers["x-session-turn"] == str(turn + 1)
            if stream:
                parts = [chunk.choices[0].delta.content or "" for chunk in answer.parse()]
                message = {"role": "assistant", "content": "".join(parts)}
            else:
                message = answer.parse().choices[0].message
            texts.append(message["content"] if stream else message.content)
            messages += [message, {"role": "user", "content": f"two {turn}"}]
    return texts


def finished(url, names):
    """Ends the sessions, fetches them, and lets the server forget them; returns them by name."""
    client = SessionsClient(url)
    for index, name in enumerate(names):
        client.reward(name, float(index), group_id="g")
    sessions = client.finished(count=len(names), wait_seconds=30)
    client.drop(sessions[-1].cursor)
    return {session.id: session for session in sessions}


def turns_of(trajectory):
    """The turns of the models, as pairs of their first token and the one behind their last."""
    authors = [2, *mask(trajectory), 2]
    begins = [i for i in range(1, len(authors)) if authors[i] != 2 and authors[i - 1] == 2]
    ends = [i for i in range(1, len(authors)) if authors[i] == 2 and authors[i - 1] != 2]
    return [(begin - 1, end - 1) for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_ids_authors_and_log_probs_of_concurrent_sessions_are_exact(url, rollout, codec, stream):
    names = [f"{stream}-{i}" for i in range(6)]

    def run(name):
        return episode(
            url, name, stream=stream, seed=len(name) + int(name[-1]), extra_body={"tandem": TANDEM}
        )

    with ThreadPoolExecutor(6) as threads:
        texts = dict(zip(names, threads.map(run, names), strict=True))
    sessions = finished(url, names)
    samples = [one for name in names for one in sessions[name].trajectories]
    assert len(samples) == len(names)
    assert {author for one in samples for author in mask(one)} == {0, 1, 2}
    info = rollout.info()
    scores = rollout.score([response_to_score(one) for one in samples], junior=True).sequences
    for name, one, score in zip(names, samples, scores, strict=True):
        ids = tokens(one)
        asked = [{"role": "user", "content": f"one {name}"}]
        assert list(one.prompt_token_ids) == codec.chat(asked)
        turns = turns_of(one)
        assert len(turns) == TURNS
        # These ids are the texts that the agent saw, and between them are its answers.
        assert [codec.decode(ids[begin:end]) for begin, end in turns] == texts[name]
        for turn, ((_, end), (begin, _)) in enumerate(itertools.pairwise(turns)):
            ended = ids[end - 1] == codec.eos_token_id
            between = ("" if ended else "<eos>") + f"user: two {turn}<eos>assistant: "
            assert ids[end:begin] == codec.encode(between, special=False)
        assert mask(one) == derived_mask(one, info)
        assert_scored(one, score, ATOL)


def test_every_turn_is_drawn_again_from_the_trajectorys_record(url, rollout):
    episode(url, "again", seed=7, extra_body={"tandem": TANDEM})
    [whole] = finished(url, ["again"])["again"].trajectories
    for begin, end in turns_of(whole):
        prompt = Prompt(
            list(whole.prompt_token_ids),
            seed=whole.seed,
            first_sample_index=whole.sample_index,
            sampling={"max_tokens": 12, "temperature": 1.0, "stop_token_ids": [0]},
            tandem=TANDEM | {"enabled": True},
            return_other_logprobs=True,
            response=ResponseSoFar(tokens(whole)[:begin], mask(whole)[:begin]),
        )
        [[turn]] = rollout.generate([prompt])
        assert tokens(turn) == tokens(whole)[begin:end]
        for model in ("senior", "junior"):
            np.testing.assert_array_equal(logprobs(turn, model), logprobs(whole, model)[begin:end])


def test_a_branch_is_a_trajectory_of_its_own(url, rollout, log):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        asked = [{"role": "user", "content": "one"}]
        first = call(client, "branch", asked).parse().choices[0].message
        for content in ("two", "three"):
            messages = [*asked, {"role": "assistant", "content": "edited"}]
            call(client, "branch", [*messages, {"role": "user", "content": content}])
        last = [*asked, first, {"role": "user", "content": "two"}]
        assert call(client, "branch", last).headers["x-session-trajectory"] == "0"
    state = SessionsClient(url).state("branch")
    assert state["begun"] == {"first": 1, "messages": 2}
    assert [one["turns"] for one in state["trajectories"]] == [2, 1, 1]
    assert log.read_text() == "WARNING: session branch: trajectory 1 begins: messages\n"
    trajectories = finished(url, ["branch"])["branch"].trajectories
    assert [one.sample_index for one in trajectories] == [0, 1, 2]
    scores = rollout.score([response_to_score(one) for one in trajectories]).sequences
    for one, score in zip(trajectories, scores, strict=True):
        drawn = np.array(mask(one)) != 2
        np.testing.assert_allclose(
            from_tensor(score.senior_logprobs)[drawn],
            logprobs(one, "senior")[drawn],
            rtol=0,
            atol=ATOL,
        )


def test_a_stop_text_ends_a_turn_with_the_token_that_completes_it(url, codec):
    stops = ["e", " t"]
    texts = episode(url, "stops", stop=stops, seed=3, max_completion_tokens=20)
    [whole] = finished(url, ["stops"])["stops"].trajectories
    cut = 0
    for (begin, end), text in zip(turns_of(whole), texts, strict=True):
        wrote = codec.decode(tokens(whole)[begin:end])
        assert wrote.startswith(text)
        stopped = [stop for stop in stops if stop in wrote]
        cut += bool(stopped)
        assert bool(stopped) == (wrote != text)
        assert not any(stop in codec.decode(tokens(whole)[begin : end - 1]) for stop in stops)
    assert cut


def test_a_trainer_learns_from_sessions_and_each_is_learnt_from_once(url, cluster, rollout):
    """Steps on sessions, one of which has turns under two versions of the weights."""
    client = SessionsClient(url)
    seen, cursor = [], None
    with harness.trainer_client(cluster) as trainer:
        for step in (1, 2):
            names = [f"step-{step}-{i}" for i in range(4)]
            for index, name in enumerate(names):
                episode(url, name, extra_body={"tandem": TANDEM})
                client.reward(name, float(index), group_id=f"g{step}")
            sessions = client.finished(cursor, count=4, wait_seconds=30)
            assert client.finished(cursor, count=4) == sessions
            report = trainer.train_step(
                policy_samples(sessions),
                run_id="sessions",
                step=step,
                expected_version=step - 1,
                objective={"advantage_estimator": "leave_one_out"},
            ).report
            authors = flat(mask(one) for session in sessions for one in session.trajectories)
            assert report.metrics["tokens/response"] == sum(author != 2 for author in authors)
            trainer.publish([rollout])
            cursor = sessions[-1].cursor
            if step == 1:
                client.drop(cursor)
            seen += [session.id for session in sessions]
        assert seen == [f"step-{step}-{i}" for step in (1, 2) for i in range(4)]
        assert client.finished(cursor) == []

        def train_again(turn):
            if turn == 1:
                trainer.train_step(
                    policy_samples(sessions),
                    run_id="sessions",
                    step=3,
                    expected_version=2,
                    objective={"advantage_estimator": "leave_one_out", "max_staleness": 1},
                )
                trainer.publish([rollout])

        episode(url, "across", between=train_again)
    client.reward("across", 1.0)
    [across] = client.finished(cursor, wait_seconds=30)
    client.drop(across.cursor)
    [whole] = across.trajectories
    [_, (begin, _), _] = turns_of(whole)
    versions = [(run.weights.version, run.count) for run in whole.senior_versions]
    # Tokens of the environment have the version of the token before them.
    assert versions == [(2, begin), (3, len(tokens(whole)) - begin)]
