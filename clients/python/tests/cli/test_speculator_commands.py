"""`tandem speculator` against fake servers, and on the files of a checkpoint."""

import itertools
import json
import shutil

import numpy as np
import pytest
import xxhash
from commands import records, tandem
from safetensors import safe_open
from safetensors.numpy import save_file

from tandem.evaluation.drafts import measure_drafts
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings

WEIGHTS = np.array([1.0, -2.5, 1e-3], np.float32)


def write_checkpoint(directory, weights=WEIGHTS):
    """A checkpoint with a speculator, as far as an export reads it, and its manifest."""
    folder = directory / "speculator"
    folder.mkdir(parents=True)
    save_file({"speculator.w": weights}, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"the senior")
    (directory / "speculator_optimizer.safetensors").write_bytes(b"moments")
    write_manifest(directory)
    return directory


def write_manifest(directory):
    files = [
        {
            "name": str(file.relative_to(directory)),
            "xxh3_128": xxhash.xxh3_128_hexdigest(file.read_bytes()),
        }
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    ]
    (directory / "manifest.json").write_text(json.dumps({"files": files}))


@pytest.mark.parametrize(
    ("name", "kind", "rounding"),
    [("fp32", "float32", 0), ("bf16", "bfloat16", 2**-8), ("fp16", "float16", 2**-11)],
)
def test_a_speculator_becomes_a_directory_of_the_format(tmp_path, name, kind, rounding):
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    out = tmp_path / "heads"
    shown = tandem("speculator", "export", checkpoint, out, "--dtype", name, "--json").stdout
    assert json.loads(shown) == {"path": str(out), "dtype": kind}
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors"}
    with safe_open(out / "model.safetensors", framework="pt") as file:
        tensor = file.get_tensor("speculator.w")
    assert str(tensor.dtype) == f"torch.{kind}"
    np.testing.assert_allclose(tensor.float().numpy(), WEIGHTS, rtol=rounding, atol=0)
    assert json.loads((out / "config.json").read_text()) == {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "torch_dtype": kind,
    }


def test_the_speculator_of_a_run_is_that_of_its_last_checkpoint(run_file, tmp_path):
    tandem("sft", run_file, "steps=1")
    write_checkpoint(tmp_path / "with")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    shutil.copytree(tmp_path / "with" / "speculator", checkpoint / "speculator", dirs_exist_ok=True)
    write_manifest(checkpoint)
    tandem("speculator", "export", tmp_path / "run", tmp_path / "heads")
    assert "MLPSpeculator" in (tmp_path / "heads" / "config.json").read_text()


def test_what_is_no_speculator_is_refused_and_nothing_is_written(tmp_path):
    def said(source, *options):
        return tandem("speculator", "export", source, out, *options, check=2).stderr

    out = tmp_path / "heads"
    checkpoint = write_checkpoint(tmp_path / "step_000001")
    assert f"SOURCE: {tmp_path} is neither a checkpoint nor a run" in said(tmp_path)
    assert "'int8' is not one of fp32, bf16, fp16" in said(checkpoint, "--dtype", "int8")
    large = write_checkpoint(tmp_path / "large", np.array([1e5], np.float32))
    assert "numbers that float16 cannot hold" in said(large, "--dtype", "fp16")
    config = checkpoint / "speculator" / "config.json"
    config.write_text(config.read_text() + " ")
    assert "speculator/config.json: its digest differs from the manifest's" in said(checkpoint)
    config.unlink()
    assert "speculator/config.json: is missing" in said(checkpoint)
    for file in (checkpoint / "speculator").iterdir():
        file.unlink()
    write_manifest(checkpoint)
    assert f"{checkpoint} has no speculator" in said(checkpoint)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    assert "heads exists" in said(large)
    assert [file.name for file in out.iterdir()] == ["mine"]


def test_a_speculator_trains_on_the_senior_s_own_responses(world, run_file, tmp_path):
    world.has_speculator = True
    trained = tandem("speculator", "train", run_file, "steps=2", "sft.batch_size=5")
    assert "run directory" in trained.stdout
    assert world.headers[0].WhichOneof("objective") == "supervised"
    assert len(records(tmp_path / "run", 2)) == 5
    # It is a run of `tandem sft`.
    resume = ("--resume", "steps=3", "sft.batch_size=5")
    tandem("sft", run_file, *resume, "sft.responses=senior")
    tandem("speculator", "train", run_file, "--resume", "auto", "steps=4", "sft.batch_size=5")
    assert [header.step for header in world.headers] == [1, 2, 3, 4]


def test_an_override_lets_a_speculator_learn_the_rows_answers(world, run_file):
    world.has_speculator = True
    tandem("speculator", "train", run_file, "steps=1", "sft.responses=rows")
    assert "Generate" not in {method for method, _ in world.calls}
    assert world.headers[0].num_samples == 16


@pytest.mark.parametrize("section", ["", "speculator: {n_predict: 2}", "speculator: null"])
def test_a_trainer_without_a_speculator_is_refused_before_it_starts(run_file, tmp_path, section):
    model = tmp_path / "model"
    override = f"cluster={{rollout: {{}}, model: {model}, trainer: {{{section}}}}}"
    for arguments in ([], ["--dry-run"]):
        done = tandem("speculator", "train", run_file, override, *arguments, check=2)
        assert "cluster.trainer.speculator: the trainer does not train a speculator" in done.stderr
        assert "hint: its `adapter` names the kind" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_running_trainer_without_a_speculator_is_refused_before_a_step(
    world, run_file, address, tmp_path
):
    for arguments in ([], ["--dry-run"]):
        done = tandem("speculator", "train", run_file, *arguments, check=2)
        said = f"servers.trainer: the trainer at {address} does not train a speculator"
        assert said in done.stderr
        assert "hint: the section `speculator` of its configuration" in done.stderr
    assert world.headers == []
    assert not (tmp_path / "run").exists()
    world.has_speculator = True
    tandem("speculator", "train", run_file, "--dry-run")


@pytest.fixture
def drafting(world):
    """The fake servers, whose speculator drafts two tokens for every one, one of them right."""
    world.speculator_heads = 3
    world.drafts_of = lambda prompt: (4, 2) if prompt.speculative.method else (0, 0)
    return world


def test_eval_measures_drafts_greedy_and_at_the_temperature_of_the_run(run_file, drafting):
    sampling = ("sampling.temperature=0.7", "sampling.ignore_eos=true")
    prompts = []
    drafting.on_prompt = prompts.append
    said = json.loads(tandem("speculator", "eval", run_file, *sampling, "--json").stdout)
    assert (said["method"], said["concurrency"], said["checkpoint"]) == ("heads", 1, None)
    assert [one["temperature"] for one in said["results"]] == [0, 0.7]
    for one in said["results"]:
        tokens = one["response_tokens"]
        assert one["prompts"] == 20
        assert (one["draft_tokens"], one["accepted_draft_tokens"]) == (80, 40)
        assert one["acceptance_rate"] == 0.5
        assert one["mean_accepted_length"] == 40 / (tokens - 40)
        assert one["free_fraction"] == 40 / tokens
        assert one["responses_that_differ"] == 0
    assert {prompt.tandem.enabled for prompt in prompts} == {False}
    assert {round(prompt.sampling.temperature, 3) for prompt in prompts} == {0, 0.7}
    # Each prompt is brought into the cache, and answered in both ways, which take turns to begin.
    shape = [(one.sampling.max_tokens, one.speculative.method) for one in prompts[:6]]
    assert shape == [(1, 0), (6, 0), (6, 4), (1, 0), (6, 4), (6, 0)]
    assert len({prompt.seed for prompt in prompts[:3]}) == 1


def test_the_speeds_are_tokens_by_the_time_of_their_calls(run_file, drafting):
    # A call takes one second more than the call before.
    times = itertools.accumulate(itertools.count(), lambda now, call: now + call % 2 * (call + 1))
    config = loading.load(RunSettings, run_file, ["speculative.method=heads", "data.limit=2"])
    with open_session(config, purpose="drafts") as session:
        [greedy, sampled] = measure_drafts(session, clock=lambda: next(times))
    # Greedy: 2 s without and 4 s with drafts for the first prompt, 6 s with and 8 s without next.
    for measured, seconds in ((greedy, 10), (sampled, 26)):
        [one] = measured.rounds
        assert (one.plain.seconds, one.drafted.seconds) == (seconds, seconds)
    summary = sampled.summary()
    assert summary["tokens_per_second"] == summary["response_tokens"] / 26
    assert summary["speed_up"] == 1
    # A single round says nothing of the noise.
    assert (summary["repeats"], summary["speed_up_low"], summary["speed_up_high"]) == (
        1,
        None,
        None,
    )


def test_repeats_give_the_speed_up_an_interval(run_file, drafting):
    config = loading.load(RunSettings, run_file, ["speculative.method=heads", "data.limit=1"])
    # Without drafts 2 s in every round, with drafts 1 s and 2 s.
    spans = [2, 1, 2, 2] * 2  # plain, drafted; then drafted comes first
    now, times = 0, []
    for span in spans:
        times += [now, now + span]
        now += span
    ticks = iter(times)
    with open_session(config, purpose="drafts") as session:
        [greedy, _] = measure_drafts(session, repeats=2, clock=lambda: next(ticks))
    ups = [one.speed_up for one in greedy.rounds]
    assert ups == [2.0, 1.0]
    summary = greedy.summary()
    assert summary["repeats"] == 2
    assert summary["speed_up"] == pytest.approx(4 / 3)
    half = 12.706 * np.std(np.log(ups), ddof=1) / 2**0.5
    assert summary["speed_up_low"] == pytest.approx(4 / 3 * np.exp(-half))
    assert summary["speed_up_high"] == pytest.approx(4 / 3 * np.exp(half))
    # The drafts are those of one round.
    assert summary["draft_tokens"] == 4


def test_responses_that_differ_with_drafts_are_counted(run_file, drafting):
    def spoil(prompt):
        if prompt.speculative.method and prompt.prompt_token_ids[0] < 5:
            prompt.seed += 1

    drafting.on_prompt = spoil
    said = json.loads(tandem("speculator", "eval", run_file, "--json").stdout)
    assert [one["responses_that_differ"] for one in said["results"]] == [3, 3]


def test_eval_shows_a_table_and_says_what_answered(run_file, drafting, tmp_path):
    tandem("train", run_file, "steps=2")
    run = tmp_path / "run"
    drafting.drafts_of = lambda prompt: (0, 0)
    arguments = ("--checkpoint", run, "--concurrency", "7", "--repeats", "1")
    arguments += ("sampling.temperature=0",)
    drafting.batches.clear()
    shown = tandem("speculator", "eval", run_file, *arguments).stdout
    assert "20 prompts, 7 at a time, 1 repeat, drafts by heads; senior version 2, from " in shown
    assert f"from {run}/checkpoints" in shown
    # There is one temperature, and nothing to divide by.
    assert "\ttemperature 0\n" in shown
    assert "share accepted\t-\n" in shown
    assert [len(batch) for batch in drafting.batches] == [7] * 6 + [6] * 3


def test_eval_takes_the_drafts_that_a_run_file_names(run_file, drafting):
    methods = set()
    drafting.on_prompt = lambda prompt: methods.add(prompt.speculative.method)
    ngram = tandem("speculator", "eval", run_file, "speculative.method=ngram", "--json")
    assert json.loads(ngram.stdout)["method"] == "ngram"
    assert methods == {0, 2}
    own = ("speculative.method=ngram", "eval.speculative.method=junior")
    junior = tandem("speculator", "eval", run_file, *own, "--json")
    assert json.loads(junior.stdout)["method"] == "junior"


def test_eval_needs_a_speculator_and_no_answers(run_file, world, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1 w2"}\n')
    for arguments in ([], ["--dry-run"]):
        done = tandem("speculator", "eval", run_file, *arguments, check=2)
        assert "eval.speculative.method: heads: the rollout server at" in done.stderr
        assert "has no speculator" in done.stderr
    assert "Generate" not in {method for method, _ in world.calls}
    world.speculator_heads = 3
    shown = tandem("speculator", "eval", run_file, "--dry-run", "--json").stdout
    assert json.loads(shown)["config"]["eval"]["speculative"]["method"] == "heads"
    tandem("speculator", "eval", run_file)
    said = tandem("speculator", "eval", run_file, "eval.max_tokens=127", check=2).stderr
    assert "eval.max_tokens: 127, but the servers' max_model_len of 128" in said
