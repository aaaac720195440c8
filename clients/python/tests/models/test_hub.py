"""Models and data sets of the Hugging Face Hub, from a cache of the test; no network is used."""

import json
from fnmatch import fnmatch
from pathlib import Path

import fakes
import pytest

from tandem.data.dataset import load_dataset
from tandem.data.hub import hub_source
from tandem.errors import ConfigError
from tandem.models.hub import local_model, snapshot
from tandem.models.importing import import_model
from tandem.models.tokenizer import TextCodec
from tandem.preflight.planned_cluster import check_cluster
from tandem.preflight.problems import Problems
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import DataSettings, RunSettings

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, in offline mode."""
    import datasets
    from huggingface_hub import constants

    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.chdir(tmp_path)
    return folder


def cached(cache, kind, name):
    """Makes the folder of a snapshot in the cache, laid out as by `hf download`."""
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_a_tokenizer_of_the_hub_is_its_snapshot(cache):
    folder = fakes.write_tokenizer(cached(cache, "model", "acme/tiny"))
    values = {"run_dir": "run", "tokenizer": "acme/tiny", "data": {"jsonl": "rows.jsonl"}}
    config = loading.validate(RunSettings, values, "test")
    assert config.tokenizer == folder
    assert TextCodec(config.tokenizer).encode("w5") == [5]


def test_models_of_a_cluster_are_snapshots_too(cache):
    folder = cached(cache, "model", "acme/tiny")
    values = {"rollout": {"senior_model": "acme/tiny"}, "trainer": {"model": "acme/tiny"}}
    config = loading.validate(ClusterSettings, values, "test")
    assert config.trainer == {"model": str(folder)}
    assert config.rollout == [{"senior_model": str(folder)}]


def test_a_model_that_is_overridden_is_not_looked_up(cache, tmp_path, monkeypatch):
    folder = cached(cache, "model", "acme/tiny")
    asked = []

    def look_up(name, *arguments, **options):
        asked.append((name, options))
        return snapshot(name, *arguments, **options)

    monkeypatch.setattr("tandem.models.hub.snapshot", look_up)
    file, elsewhere = tmp_path / "files" / "run.yaml", tmp_path / "files" / "mine"
    elsewhere.mkdir(parents=True)
    cluster = "cluster: {model: acme/other, rollout: {senior_model: acme/third}, trainer: {}}"
    file.write_text(f"run_dir: run\ndata: {{jsonl: rows.jsonl}}\n{cluster}\n")
    overrides = ["cluster.model=acme/tiny", "cluster.rollout.senior_model=files/mine"]
    config = loading.load(RunSettings, file, overrides, weights=False)
    assert config.cluster.model == folder
    assert config.cluster.rollout[0]["senior_model"] == str(elsewhere)
    assert config.tokenizer == elsewhere
    [(name, _)] = asked
    assert name == "acme/tiny"
    # A cluster file is read before the overrides, too.
    asked.clear()
    (tmp_path / "files" / "cluster.yaml").write_text(cluster.removeprefix("cluster: "))
    file.write_text("run_dir: run\ndata: {jsonl: rows.jsonl}\ncluster: cluster.yaml\n")
    assert loading.load(RunSettings, file, overrides).cluster.model == folder
    assert [name for name, _ in asked] == ["acme/tiny"]


def test_a_dry_run_fetches_no_weights(cache, monkeypatch, notes):
    patterns = []

    def look_up(name, kind, field, files, *arguments):
        patterns.append(files)
        return snapshot(name, kind, field, files, *arguments)

    cached(cache, "model", "acme/tiny")
    monkeypatch.setattr("tandem.models.hub.snapshot", look_up)
    values = {"rollout": {"senior_model": "acme/tiny"}, "trainer": {"model": "acme/tiny"}}
    plan = loading.validate(ClusterSettings, values, "test", weights=False)
    assert len(patterns) == 2
    assert not any("*.safetensors" in files for files in patterns)
    # Servers of models without weights cannot check themselves.
    problems = Problems()
    checked = check_cluster(plan, None, None, problems)
    assert checked.servers is None
    assert problems.errors == []
    assert [note.partition(" is")[0] for note in notes] == ["cluster.rollout", "cluster.trainer"]


def test_a_revision_selects_the_commit_of_its_model(cache):
    """And a resolved configuration is resolved again: the path keeps its revision."""
    main = cached(cache, "model", "acme/tiny")
    other = main.parent / ("89abcdef" * 5)
    other.mkdir()
    values = {
        "model": "acme/tiny",
        "rollout": {"senior_model": "acme/tiny", "senior_model_revision": other.name}
        | {"junior_model": "acme/tiny"},
    }
    config = loading.validate(ClusterSettings, values, "test")
    assert config.rollout == [
        {"senior_model": str(other), "senior_model_revision": other.name, "junior_model": str(main)}
    ]
    again = loading.validate(ClusterSettings, config.model_dump(mode="json"), "test")
    assert again.rollout == config.rollout
    nested = {"rollout": {"senior": {"model": "acme/tiny", "model_revision": other.name}}}
    config = loading.validate(ClusterSettings, nested, "test")
    assert config.rollout == [{"senior": {"model": str(other), "model_revision": other.name}}]


def test_a_commit_that_is_not_there_is_named(cache):
    cached(cache, "model", "acme/tiny")
    commit = "89abcdef" * 5
    section = {"junior_model": "acme/tiny", "junior_model_revision": commit}
    with pytest.raises(ConfigError, match=r"^cluster\.rollout\.junior_model: the model") as caught:
        loading.validate(ClusterSettings, {"rollout": section}, "test")
    assert f"`hf download acme/tiny --revision {commit}`" in caught.value.hint


def test_a_directory_comes_before_the_hub(cache, tmp_path):
    cached(cache, "model", "acme/tiny")
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert local_model("acme/tiny", tmp_path, "model") == tmp_path / "acme" / "tiny"


@pytest.mark.parametrize("field", ["tokenizer", "cluster.model", "cluster.rollout.senior_model"])
def test_a_path_in_a_directory_is_missing_and_not_looked_up(tmp_path, field, monkeypatch):
    monkeypatch.setattr("tandem.models.hub.snapshot", None)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    values = {"run_dir": "run", "tokenizer": "tiny", "data": {"jsonl": "rows.jsonl"}}
    values["cluster"] = {"rollout": {}, "trainer": {}}
    section = values
    *parents, key = field.split(".")
    for parent in parents:
        section = section[parent]
    section[key] = "models/tiny"
    with pytest.raises(ConfigError) as caught:
        loading.validate(RunSettings, values, "test")
    assert caught.value.message == f"{field}: {tmp_path}/models/tiny does not exist"
    assert f"`hf download models/tiny --local-dir {tmp_path}/models/tiny`" in caught.value.hint


def test_other_paths_are_never_looked_up(cache, tmp_path, monkeypatch, subtests):
    for name in ["tiny", "/acme/tiny", "../acme/tiny", "a/b/c", "./tiny", "~/tiny"]:
        with subtests.test(name=name):
            monkeypatch.setattr("tandem.models.hub.snapshot", None)
            assert local_model(name, tmp_path, "model").is_absolute()


def test_without_a_network_the_command_that_fetches_a_model_is_named(cache, tmp_path):
    values = {"run_dir": "run", "tokenizer": "Qwen/Qwen2.5-0.5B", "data": {"jsonl": "rows.jsonl"}}
    with pytest.raises(ConfigError, match=r"^tokenizer: the model Qwen/") as caught:
        loading.validate(RunSettings, values, "test")
    assert "`hf download Qwen/Qwen2.5-0.5B`" in caught.value.hint
    assert f"{tmp_path}/Qwen/Qwen2.5-0.5B does not exist" in caught.value.message
    with pytest.raises(ConfigError, match=r"^SOURCE: the model Qwen/") as caught:
        import_model("Qwen/Qwen2.5-0.5B", tmp_path / "model")
    assert "`hf download Qwen/Qwen2.5-0.5B`" in caught.value.hint


def test_a_model_of_the_hub_is_imported(cache, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = fakes.write_tokenizer(cached(cache, "model", "acme/tiny"))
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    model = import_model("acme/tiny", tmp_path / "model")
    assert (model.path / "model.safetensors").exists()
    assert import_model("acme/tiny", tmp_path / "model").already_there


def test_a_data_set_of_the_hub_has_configurations_splits_and_slices(cache, tmp_path):
    folder = cached(cache, "dataset", "acme/sums")
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: easy\n  data_files:\n  - {split: test, path: easy.jsonl}\n"
        "- config_name: hard\n  data_files:\n  - {split: test, path: hard.jsonl}\n---\n"
    )
    for level in ("easy", "hard"):
        rows = ({"question": f"w{n}", "level": level} for n in range(1, 6))
        (folder / f"{level}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    codec = TextCodec(fakes.write_tokenizer(tmp_path / "model"))
    hub = {"name": "acme/sums", "config": "hard", "split": "test[1:3]"}
    data = load_dataset(DataSettings(hub=hub, columns={"prompt": "question"}), codec)
    assert [one.row for one in data.examples] == [
        {"prompt": "w2", "level": "hard"},
        {"prompt": "w3", "level": "hard"},
    ]
    assert [one.place for one in data.examples] == ["acme/sums[0]", "acme/sums[1]"]
    wrong = {"name": "acme/sums", "config": "harder", "split": "test"}
    with pytest.raises(ConfigError, match=r"^data\.hub: acme/sums: .*harder"):
        load_dataset(DataSettings(hub=wrong), codec)


@pytest.fixture
def online(cache, monkeypatch, tmp_path):
    """A Hub with one data set of several configurations and splits; returns what was fetched."""
    files = {
        "easy/train-1.jsonl": "w1",
        "easy/train-2.jsonl": "w2",
        "easy/test.jsonl": "w3",
        "hard.jsonl": "w4",
    }
    card = (
        "---\nconfigs:\n- config_name: easy\n  data_files:\n"
        "  - {split: train, path: easy/train-*.jsonl}\n  - {split: test, path: easy/test.jsonl}\n"
        "- config_name: main\n  data_files:\n  - {split: test, path: hard.jsonl}\n---\n"
    )
    fetched = []

    def download(name, *, allow_patterns, **options):
        folder = tmp_path / "fetched"
        fetched.append(sorted(allow_patterns))
        for file in allow_patterns:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            row = json.dumps({"prompt": files.get(file)}) + "\n"
            (folder / file).write_text(card if file == "README.md" else row)
        return str(folder)

    names = ["README.md", *files]
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("tandem.data.hub.repository_files", lambda name, revision: names)
    return fetched


@pytest.mark.parametrize(
    ("config", "split", "prompts", "files"),
    [
        ("easy", "train", ["w1", "w2"], ["easy/train-1.jsonl", "easy/train-2.jsonl"]),
        ("easy", "train[1:]", ["w2"], ["easy/train-1.jsonl", "easy/train-2.jsonl"]),
        ("easy", "test", ["w3"], ["easy/test.jsonl"]),
        ("main", "test", ["w4"], ["hard.jsonl"]),
        ("easy", "test+train[:1]", ["w3", "w1"], ["easy/test.jsonl", "easy/train-*"]),
    ],
)
def test_the_files_of_the_split_alone_are_fetched(online, tmp_path, config, split, prompts, files):
    codec = TextCodec(fakes.write_tokenizer(tmp_path / "model"))
    hub = {"name": "acme/sums", "config": config, "split": split}
    data = load_dataset(DataSettings(hub=hub), codec)
    assert [one.row["prompt"] for one in data.examples] == prompts
    card, rows = online
    assert card == ["README.md"]
    assert all(any(fnmatch(one, file) for file in files) for one in rows if one != "README.md")


def test_a_split_that_a_data_set_lacks_is_named_before_it_is_fetched(online, tmp_path):
    codec = TextCodec(fakes.write_tokenizer(tmp_path / "model"))
    hub = {"name": "acme/sums", "config": "main", "split": "train"}
    with pytest.raises(ConfigError, match=r"^data.hub.split: acme/sums has no split 'train'; .*te"):
        load_dataset(DataSettings(hub=hub), codec)
    assert online == [["README.md"]]
    # As `tandem init` asks for it: main has no split train.
    wanted = {"name": "acme/sums", "config": "main", "split": "test"}
    assert hub_source("acme/sums", None, "DATA") == wanted
    assert hub_source("acme/sums", "easy", "DATA") == {"name": "acme/sums", "config": "easy"}
    with pytest.raises(ConfigError, match=r"^DATA: acme/sums: .*none"):
        hub_source("acme/sums", "none", "DATA")


def test_a_cache_with_the_files_of_one_split_is_read_without_a_network(cache, tmp_path):
    folder = cached(cache, "dataset", "acme/sums")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files:\n"
        "  - {split: train, path: train-*.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    (folder / "test.jsonl").write_text('{"prompt": "w7"}\n')
    codec = TextCodec(fakes.write_tokenizer(tmp_path / "model"))
    hub = {"name": "acme/sums", "config": "easy", "split": "test"}
    [example] = load_dataset(DataSettings(hub=hub), codec).examples
    assert example.token_ids == [7]


def test_without_a_network_the_command_that_fetches_a_data_set_is_named(cache, tmp_path):
    codec = TextCodec(fakes.write_tokenizer(tmp_path / "model"))
    wanted = DataSettings(hub={"name": "openai/gsm8k", "config": "main", "revision": "v1"})
    with pytest.raises(ConfigError, match=r"^eval\.data\.hub\.name: the dataset openai") as caught:
        load_dataset(wanted, codec, field="eval.data")
    command = "`hf download openai/gsm8k --repo-type dataset --revision v1`"
    assert command in caught.value.hint


def test_with_a_network_the_hub_is_asked_for_what_is_read(monkeypatch, tmp_path):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    base = Path("/nowhere")
    assert local_model("acme/tiny", base, "model") == tmp_path
    assert local_model("acme/tiny", base, "tokenizer", weights=False) == tmp_path
    assert snapshot("acme/sums", "dataset", "data.hub", revision="v1") == tmp_path
    patterns = [options["allow_patterns"] for _, options in asked]
    assert "*.safetensors" in patterns[0]
    assert "*.safetensors" not in patterns[1]
    for _, options in asked[:2]:
        unread = options["ignore_patterns"]
        files = ["original/consolidated.00.pth", "consolidated.safetensors", "adapter_config.json"]
        files += ["onnx/model.safetensors", "config.json", "model-00001-of-00002.safetensors"]
        read = [name for name in files if not any(fnmatch(name, one) for one in unread)]
        assert read == ["config.json", "model-00001-of-00002.safetensors"]
    assert patterns[2] is None
    assert [options["revision"] for _, options in asked] == [None, None, "v1"]
