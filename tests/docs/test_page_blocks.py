"""Every code block of a page says how it is tested, and its commands, files and settings exist."""

from __future__ import annotations

import ast
import json
import re

import pytest
import yaml
from page_blocks import REPOSITORY, SHELL, TEXT, Block, blocks, blocks_of
from shell_commands import commands, problems, statements
from tandem.cluster.local import sections
from tandem.rpc.wire import to_message
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.lanes import FLAT_NAMES
from tandem.settings.run import RunSettings

BLOCKS = blocks()
# A part of a run or cluster file is read together with a file that is whole.
WHOLE_RUN = REPOSITORY / "examples/own_data/run.yaml"
WHOLE_CLUSTER = REPOSITORY / "examples/recipes/cluster.yaml"


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in BLOCKS))
def test_the_blocks_of_a_page_name_what_exists(page, subtests):
    for block in BLOCKS:
        if block.page == page:
            with subtests.test(str(block)):
                check(block)


def check(block: Block):
    """Fails unless a block says how it is tested, and names what exists."""
    if block.language in TEXT:
        starts = ("tandem ", "make ", "$ ", ".venv/bin/", "build/release/bin/")
        commands = [line for line in block.text.splitlines() if line.startswith(starts)]
        assert commands == [], "commands stand in a block of the shell"
        return
    check_marker(block)
    if block.language in SHELL:
        assert problems(block.text) == []
    elif block.language == "python":
        ast.parse(block.text)
    elif block.language == "yaml":
        assert list(yaml.safe_load_all(block.text))
    elif block.language == "json":
        check_json(block.text)
    if block.kind == "part of":
        # The models need not be there.
        values = yaml.safe_load(re.sub(r"\bmodels/[\w.-]+", str(REPOSITORY), block.text))
        (check_run if block.what == "a run file" else check_cluster)(values)


def check_marker(block: Block):
    assert block.kind, f"needs a marker above it (tests/docs/page_blocks.py), not {block.marker!r}"
    if block.kind == "run":
        assert not block.what
        assert block.language in (*SHELL, "python")
    elif block.kind == "tested by":
        assert (REPOSITORY / block.what).is_file()
    elif block.kind == "part of":
        assert block.what in ("a run file", "a cluster file")
    else:
        assert len(block.what.split()) > 1, "a reason has words"


def check_json(text: str):
    rest = text.strip()
    while rest:  # one value, or several
        _, end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:].lstrip()


def check_run(values):
    # A run has `reward` or `rewards`.
    alone = ["reward={}"] if "rewards" in values else []
    loading.load(RunSettings, WHOLE_RUN, [*alone, *overrides(values)])


def check_cluster(values):
    from tandem._proto.config.v1 import server_config_pb2 as schema

    cluster = loading.load(ClusterSettings, WHOLE_CLUSTER, overrides(values))
    for section in sections(cluster):
        message = getattr(schema, f"{section.role.capitalize()}ServerConfig")()
        # A setting of a lane may have its flat name, which is no field.
        flat = FLAT_NAMES.values() if section.role == "rollout" else ()
        values = section.with_free_ports().items()
        to_message({k: v for k, v in values if k not in flat}, message, section.field)


def overrides(values) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def test_a_wrong_command_is_found(subtests):
    for command, problem in [
        ("tandem trian examples/sums/run.yaml", "no command trian"),
        ("tandem train examples/sums/run.yaml --resum", "No such option"),
        ("tandem train examples/sums/run.yaml stepz=3", "stepz"),
        ("tandem record --out FILE -- tandem train run.yaml --resum", "No such option"),
        ("build/release/bin/tandem-trainer-server --chek-config", "no option --chek-config"),
        ("export A=1; tandem-trainer-server model=a batch.micro_batch_token=3", "no setting batch"),
        ("TANDEM__SERVER__HOTS=a tandem-trainer-server", "no setting server.hots"),
        ("make demos", "no target demos"),
        ("cat examples/demo/rn.yaml", "no examples/demo/rn.yaml"),
        ("tadem up", "no program"),
        ("build/release/common/ops/no_such_test", "no CMakeLists.txt builds no_such_test"),
        ("if true; do", "syntax error"),
        ("for i in 1 2; do\n  make $i demos\ndone", "no target demos"),
        ("cat >a.json <<EOF\n{'tadem'}\nEOF\ntadem up", "no program"),
    ]:
        with subtests.test(command=command, problem=problem):
            [found] = problems(command)
            assert problem in found


def test_here_documents_quotes_and_loops_are_one_statement():
    loop = "for i in 1 2; do\n  echo $i\ndone"
    document = "cat <<EOF\nit's text # no comment\nEOF"
    quoted = "echo '{\n}'"
    assert statements(f"{loop}\n{document}\n{quoted}\nls   # lists\n") == [
        loop,
        document,
        quoted,
        "ls",
    ]
    assert list(commands(document)) == [["cat", "<<", "EOF"]]


def test_a_page_may_have_one_marker_for_all():
    one, other = "```sh\na\n```\n", "```sh\nb\n```\n"
    page = f"<!-- all blocks: not run: for a reason -->\n\n{one}\n<!-- run -->\n\n{other}"
    first, second = blocks_of("page.md", page)
    assert (first.kind, first.what, second.kind) == ("not run", "for a reason", "run")


def test_the_marker_is_the_comment_right_above():
    page = "<!-- run -->\n\n```sh\na\n```\n\n<!-- run -->\n\ntext\n\n```sh\nb\n```\n"
    first, second = blocks_of("page.md", page)
    assert (first.kind, first.line, first.text) == ("run", 3, "a\n")
    assert second.kind == ""
