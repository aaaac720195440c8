"""Documents, examples and deployment files use the names that the code defines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from check_layers import REPOSITORY
from tandem.openai_server import errors, fields

DOCUMENT = (REPOSITORY / "docs/reference/metrics.md").read_text()
RANKS = (REPOSITORY / "docs/operations/ranks.md").read_text()
COMMANDS = (REPOSITORY / "docs/getting-started/where-things-are.md").read_text()


def test_every_key_of_metrics_jsonl_is_documented():
    from tandem import metrics

    section = DOCUMENT.split("## `evals.jsonl`")[0]
    keys = metrics.KEYS + metrics.CRITIC_KEYS + metrics.ENVIRONMENT_KEYS
    keys += metrics.ASYNC_KEYS + metrics.ASYNC_CRITIC_KEYS
    keys += metrics.PAIR_KEYS + metrics.UPLOAD_KEYS
    assert set(keys) == set(
        re.findall(
            r"`([a-z_0-9]+(?:/[a-z_0-9]+)*)`", "".join(re.findall(r"^\| (.*?) \|", section, re.M))
        )
    )


def test_make_help_lists_the_commands_of_the_page():
    commands = set(re.findall(r"^make ([a-z-]+)", COMMANDS, re.MULTILINE))
    described = set(
        re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    )
    assert commands <= described


EXAMPLES = REPOSITORY / "examples"


def example(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/run*.yaml")), ids=example)
def test_example_runs_hold_valid_server_configurations(file: Path):
    from google.protobuf import json_format
    from tandem._proto.config.v1 import server_config_pb2 as schema
    from tandem.cluster.local import sections
    from tandem.settings import loading
    from tandem.settings.lanes import FLAT_NAMES
    from tandem.settings.run import RunSettings

    cluster = loading.load(RunSettings, file).cluster
    assert cluster is not None
    for section in sections(cluster):
        assert section.ranks >= 1
        message = getattr(schema, f"{section.role.capitalize()}ServerConfig")()
        config = section.with_free_ports()
        for name, flat in FLAT_NAMES.items() if section.role == "rollout" else ():
            if flat in config:
                lane, _, key = name.partition(".")
                config[lane] = config.get(lane, {}) | {key: config.pop(flat)}
        json_format.ParseDict(config, message)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/cluster*.yaml")), ids=example)
def test_example_clusters_are_valid(file: Path):
    from tandem.settings import loading
    from tandem.settings.cluster import ClusterSettings

    loading.load(ClusterSettings, file)


def test_the_variables_of_a_rank_are_those_that_servers_read():
    code = (REPOSITORY / "common/base/machine/rank_environment.cc").read_text()
    table = re.findall(r"^\| `([A-Z_]+)` \|", RANKS, re.MULTILINE)
    assert sorted(table) == sorted(set(re.findall(r'Variable\("(\w+)"', code)))


def test_the_page_of_kernels_names_every_entry_and_every_kernel():
    folder = REPOSITORY / "common/kernels/cpu"
    header = (folder / "cpu_kernels.h").read_text()
    table = re.search(r"struct CpuKernels \{(.*?)\n\};", header, re.S)[1]
    entries = re.findall(r"(\w+)(?:\)\(const [\w<>]+&\))? = (?:nullptr|\{\})", table)
    sources = "".join(file.read_text() for file in folder.glob("*.cc") if "_test" not in file.name)
    kernels = re.findall(r'(?:\.name = |SimdKernels\()"(\w+)"', header + sources)
    assert {"linear", "bfloat16_product"} <= set(entries)
    assert {"portable", "aten", "amx"} <= set(kernels)
    page = set(re.findall(r"`(\w+)`", (REPOSITORY / "docs/internals/kernels.md").read_text()))
    assert {*entries, *kernels} - page == set()


def test_every_field_of_the_objective_is_on_a_page():
    proto = (REPOSITORY / "proto/tandem/trainer/v1/objective.proto").read_text()
    fields = re.findall(r"^  (?:optional )?\w+ (\w+) = \d+;", proto, re.M)
    assert "clip_ratio_low" in fields
    guides = REPOSITORY / "docs/guides"
    pages = [
        *(guides / "losses").glob("*.md"),
        guides / "experts.md",
        REPOSITORY / "docs/reference/trl-and-verl.md",
    ]
    text = "".join(page.read_text() for page in pages)
    assert set(fields) - set(re.findall(r"\w+", text)) == set()


def test_every_recipe_names_an_example_and_stands_in_the_architecture():
    folder = REPOSITORY / "docs/internals"
    recipes = {"adding-a-family.md": (folder / "adding-a-family.md").read_text()}
    _, *others = re.split(r"^## ", (folder / "adding-things.md").read_text(), flags=re.M)
    for recipe in others:
        title = recipe.splitlines()[0]
        recipes[f"adding-things.md#{title.lower().replace(' ', '-')}"] = recipe
    assert len(recipes) == 9
    architecture = (folder / "architecture.md").read_text()
    for link, recipe in recipes.items():
        assert "Example:" in recipe, link
        assert f"({link})" in architecture


def test_the_page_of_openais_api_names_its_fields_and_statuses():
    page = (REPOSITORY / "docs/guides/apis/openai.md").read_text()
    ignored, refused = (
        set(re.findall(r"`(\w+)`", re.search(rf"{words}[^:]*: ([^.]*)\.", page)[1]))
        for words in ("These are ignored", "These are refused")
    )
    assert ignored == fields.IGNORED
    assert refused == fields.REFUSED.keys()
    table = page[page.index("## Fields") : page.index("These are ignored")]
    followed = set(re.findall(r"`(\w+)", table))
    models = (fields.CompletionRequest, fields.ChatRequest)
    known = {name for model in models for name in model.model_fields} - {"prompt", "messages"}
    assert known <= followed
    rows = re.findall(r"^\| ([A-Z_, ;]+) \| ([\d; ]+)", page[page.index("## Errors") :], re.M)
    told = {}
    for codes, statuses in rows:
        groups = codes.split("; ")
        for group, status in zip(groups, statuses.split("; "), strict=True):
            told |= {code.strip(): int(status) for code in group.split(", ")}
    assert told == {code.name: int(status) for code, status in errors.HTTP_STATUS.items()}
