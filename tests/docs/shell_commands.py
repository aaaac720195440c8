"""Checks the commands of a shell block without running them."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from page_blocks import REPOSITORY
from tandem.cli import app
from tandem.errors import ConfigError
from tandem.settings import loading
from tandem.settings.run import RunSettings

# The beginnings of paths that building and running make, and of paths outside of the repository.
MADE = (
    *("build/", ".venv/", ".venv-peers/", ".venv-verifiers/", "models/", "runs/", "dist/"),
    *("/", "~", "./runs/"),
)
# Programs whose arguments are not looked at.
_OTHERS = """
    base64 bash buildah cat cd chmod cmake cp ctest cut curl docker echo export find gdb git
    grep grpcurl head helm jq kill kubectl kustomize ln lm_eval ls mkdir mv od openssl pip
    pip3 podman podman-compose prometheus prometheus-alertmanager promtool rm sbatch scancel
    sed sleep sort source squeue srun sudo tail tar tee torchrun tr wait
"""
OTHERS = frozenset(_OTHERS.split())
_KEYWORDS = frozenset(
    ["do", "done", "for", "if", "then", "fi", "else", "in", "while", "!", "{", "}"]
)
_OPERATORS = frozenset({"", ";", "&", "&&", "|", "||", "(", ")"})


def statements(text: str) -> list[str]:
    """Returns the statements of a block, without comments.

    Quotes, here-documents and loops may span lines; `\\` joins them.
    """
    found, lines = [], []
    for line in text.replace("\\\n", " ").splitlines():
        if not any("<<" in before for before in lines):
            line = re.sub(r"(^|\s)#(\s.*)?$", "", line).removeprefix("$ ")
        lines.append(line)
        statement = "\n".join(lines)
        if not _bash_complaint(statement):
            found.append(statement.strip())
            lines = []
    return [statement for statement in [*found, "\n".join(lines).strip()] if statement]


def _bash_complaint(text: str) -> str:
    """Returns what bash finds wrong, also that something is not closed; "" if nothing."""
    checked = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, check=False
    )
    return checked.stderr.strip()


def commands(statement: str) -> Iterator[list[str]]:
    """Yields the words of each command of a statement."""
    document = re.compile(r"(<<-?\s*['\"]?(\w+).*)\n(?s:.*?)^\2$", re.MULTILINE)
    lexer = shlex.shlex(document.sub(r"\1", statement), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words: list[str] = []
    list_of_for = False
    for word in [*lexer, ";"]:
        if word and word.strip("\n") in _OPERATORS:
            if words:
                yield words
            words, list_of_for = [], False
        elif word == "for" and not words:
            list_of_for = True
        elif not words and re.match(r"[A-Z_]+=", word):
            yield [word]
        elif not list_of_for and (words or word not in _KEYWORDS):
            words.append(word)


def problems(text: str) -> list[str]:
    """Returns what is wrong with the commands of a block; nothing if all is well."""
    if complaint := _bash_complaint(text):
        return [complaint]
    return [
        f"{' '.join(words)}: {problem}"
        for statement in statements(text)
        for words in commands(statement)
        for problem in _command_problems(words)
    ]


def _command_problems(words: Sequence[str]) -> Iterator[str]:
    program, *arguments = words
    name = Path(program).name
    if re.match(r"[A-Z_]+=", program):
        yield from _variable_problems(program)
        return
    if name == "tandem":
        yield from _tandem_problems(arguments)
    elif re.fullmatch(r"tandem-(rollout|trainer|critic)-server", name):
        yield from _server_problems(arguments)
    elif name == "make":
        yield from _make_problems(arguments)
    elif name in ("python", "python3"):
        yield from _python_problems(arguments)
    elif program.startswith("build/") or re.fullmatch(r"(common|services)/[\w/]+_test", program):
        if name not in cmake_lists():
            yield f"no CMakeLists.txt builds {name}"
    elif name not in OTHERS and not (REPOSITORY / program).is_file():
        yield "is no program of the project, and none that tests/docs/shell_commands.py knows"
    for argument in arguments:
        yield from _path_problems(argument)


def _path_problems(argument: str) -> Iterator[str]:
    path = re.sub(r"^--?[\w-]+=", "", argument).partition("::")[0].removeprefix("./")
    looks_like_one = re.fullmatch(r"(?:[\w.-]+/)+[\w.-]*", path)
    top = path.split("/")[0]
    if not looks_like_one or path.startswith(MADE) or top == "..":
        return
    if not (REPOSITORY / top).is_dir():
        return
    if not (REPOSITORY / path).exists():
        yield f"there is no {path}"


def _tandem_problems(arguments: Sequence[str]) -> Iterator[str]:
    # typer has a click of its own, whose types are private.
    command: Any = typer.main.get_command(app.app)
    context = command.context_class(command, info_name="tandem")
    rest = list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.commands:
            yield f"there is no command {name}"
            return
        command = command.commands[name]
        context = command.context_class(command, info_name=name, parent=context)
    inner = rest[rest.index("--") + 1 :] if "--" in rest else []
    try:
        values, _, _ = command.make_parser(context).parse_args(rest)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        yield error.format_message()
        return
    if inner:
        yield from _command_problems(inner)
    elif command.name in ("train", "sft", "eval"):
        given = (values[one.name] for one in command.params if one.param_type_name == "argument")
        yield from _run_problems(*given)


def _run_problems(file: str, overrides: Sequence[str] | None) -> Iterator[str]:
    if (REPOSITORY / file).is_file():
        try:
            loading.load(RunSettings, REPOSITORY / file, overrides or ())
        except ConfigError as error:
            yield str(error)


@functools.cache
def server_options() -> frozenset[str]:
    """The options of the servers' command lines, from their code."""
    sources = [
        REPOSITORY / "common/rpc/server/server_main.cc",
        *REPOSITORY.glob("services/*/main.cc"),
    ]
    code = "".join(source.read_text() for source in sources)
    return frozenset(re.findall(r'"(--[a-z-]+)"', code)) | {"--help"}


@functools.cache
def server_settings() -> frozenset[str]:
    """The dotted keys of the servers' settings, from their page."""
    page = (REPOSITORY / "docs/reference/configuration.md").read_text()
    return frozenset(re.findall(r"^\| `([a-z_0-9.]+)` \|", page, re.MULTILINE))


def _server_problems(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        option, key = argument.split("=")[0], re.match(r"([a-z_0-9.]+)=", argument)
        if option.startswith("--") and option not in server_options():
            yield f"servers have no option {option}"
        elif key and key[1] not in server_settings():
            yield f"servers have no setting {key[1]}"
        elif key:
            yaml.safe_load(argument.partition("=")[2])


def _variable_problems(assignment: str) -> Iterator[str]:
    name = assignment.split("=")[0]
    if name.startswith("TANDEM__"):
        key = name.removeprefix("TANDEM__").replace("__", ".").lower()
        if key not in server_settings():
            yield f"servers have no setting {key}"


@functools.cache
def make_targets() -> frozenset[str]:
    """The targets of the Makefile, with its variables replaced."""
    database = subprocess.run(
        ["make", "-qp"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return frozenset(re.findall(r"^([\w./-]+):(?!=)", database.stdout, re.MULTILINE))


@functools.cache
def cmake_lists() -> frozenset[str]:
    """The words of all CMakeLists.txt, the names of programs among them."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*CMakeLists.txt"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    texts = ((REPOSITORY / name).read_text() for name in listed.stdout.splitlines())
    return frozenset(word for text in texts for word in re.findall(r"[\w.-]+", text))


def _make_problems(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if not {"=", "$"} & set(argument) and argument not in make_targets():
            yield f"the Makefile has no target {argument}"


def _python_problems(arguments: Sequence[str]) -> Iterator[str]:
    if arguments[:1] == ["-m"]:
        module = arguments[1]
        own = REPOSITORY / "clients/python" / f"{module.replace('.', '/')}.py"
        if module.startswith("tandem.") and not own.exists():
            yield f"there is no module {module}"
