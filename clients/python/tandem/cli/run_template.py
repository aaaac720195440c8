"""A commented run file for a model and a data set, to start from: `tandem init`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tandem.data.dataset import Example, load_dataset
from tandem.data.hub import hub_source
from tandem.data.sources import first_row
from tandem.errors import ConfigError
from tandem.models.files import max_positions
from tandem.models.hub import is_hub_name, local_model
from tandem.models.tokenizer import TextCodec
from tandem.rewards.math_answers import final_number
from tandem.settings.loading import validate
from tandem.settings.run import DataSettings
from tandem.settings.values import dump_values

_log = logging.getLogger(__name__)


# Usual names of the columns of prompts and answers.
_PROMPT_COLUMNS = ("question", "problem", "instruction", "query", "input", "text")
_ANSWER_COLUMNS = ("answer", "solution", "target", "output", "label")
# Most tokens of a response in the run file, where the model can hold them.
_MAX_TOKENS = 256
# Rows whose prompts are measured for max_model_len.
_MEASURED_ROWS = 200

# Judges that find the final answer of a text, and how a prompt asks for one.
_FORMATS = {
    "gsm8k": "{prompt}\n\nThink step by step, and end with the answer after ####.",
    "math": "{prompt}\n\nReason step by step, and put the final answer within \\boxed{{}}.",
}

_REWARD = '''"""The reward of the run: change it to what a good response is."""


def reward(prompt, response, **row):
    """Shorter is better; the columns of the row are keyword arguments."""
    return -len(response) / 100
'''


@dataclass(frozen=True)
class Request:
    """Model and data of a run file.

    Attributes:
        model: directory of the senior, or ORG/NAME of the Hub.
        data: a .jsonl or .parquet file, a folder of *.parquet files, ORG/NAME[:CONFIG] of the Hub,
            or reasoning_gym:TASK.
        junior: directory of the junior, or ORG/NAME of the Hub; the senior's by default.
        prompt: column of the prompt; by default the first with a usual name.
        answer: column of the answer, in the same way.
    """

    model: str
    data: str
    junior: str | None = None
    prompt: str | None = None
    answer: str | None = None


def write_run_file(request: Request, file: Path) -> list[Path]:
    """Writes a run file and, where no column is an answer, a reward.py beside it; returns both.

    Answers that end in `#### 72` are judged by `gsm8k`, those with `\\boxed{}` or other LaTeX by
    `math`, others by `exact_match`; says where the file needs a look.

    Raises ConfigError for a model or data that cannot be read, and for a file that exists.
    """
    model = local_model(request.model, Path.cwd(), "MODEL", weights=False)
    codec = TextCodec(model)
    source, row = _source(request)
    columns = _columns(request, row)
    data = source | ({"columns": columns} if columns else {})
    data["template"] = "chat" if _has_chat(codec) else "raw"
    examples = _examples(data, codec)
    judge = "own"
    if row is None:
        judge = "reasoning_gym"
    elif "answer" in {*row, *columns}:
        judge = _judge([example.row.get("answer") for example in examples])
    if judge in _FORMATS and "messages" not in examples[0].row:
        data["format"] = _FORMATS[judge]
        examples = _examples(data, codec)
    longest = max(len(example.token_ids) for example in examples)
    sizes = _sizes(longest, max_positions(model))
    texts = {file: _text(request, file, data, sizes, row, judge)}
    if judge == "own":
        texts[file.with_name("reward.py")] = _REWARD
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path} exists", hint="--output names another file")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _source(request: Request) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the source of the data as settings, and its first row, None for a generated task."""
    kind, _, task = request.data.partition(":")
    path = Path(request.data)
    if kind == "reasoning_gym":
        return {"reasoning_gym": {"name": task}}, None
    if path.suffix == ".jsonl":
        source: dict[str, Any] = {"jsonl": str(path)}
    elif path.suffix == ".parquet" or path.is_dir():
        source = {"parquet": str(path)}
    elif is_hub_name(kind):
        source = {"hub": hub_source(kind, task or None, "DATA")}
    else:
        raise ConfigError(
            f"DATA: {request.data} is not a .jsonl or .parquet file, a folder, ORG/NAME[:CONFIG] "
            "of the Hugging Face Hub, or reasoning_gym:TASK"
        )
    return source, first_row(validate(DataSettings, dict(source), "DATA"), "DATA")


def _columns(request: Request, row: dict[str, Any] | None) -> dict[str, str]:
    """Returns `data.columns`: the columns that are to be renamed."""
    if row is None:
        return {}
    found = {}
    wanted = {
        "prompt": (request.prompt, _PROMPT_COLUMNS),
        "answer": (request.answer, _ANSWER_COLUMNS),
    }
    for name, (asked, usual) in wanted.items():
        if asked is not None and asked not in row:
            raise ConfigError(f"--{name} {asked}: the columns are {', '.join(row)}")
        column = asked or next((one for one in (name, *usual) if one in row), None)
        if column not in (None, name):
            found[name] = column
        elif column is None and name == "prompt" and "messages" not in row:
            raise ConfigError(
                f"DATA: none of the columns {', '.join(row)} is known to contain the prompt",
                hint="--prompt COLUMN names it",
            )
    return found


def _has_chat(codec: TextCodec) -> bool:
    try:
        return bool(codec.chat([{"role": "user", "content": "x"}]))
    except ConfigError:
        return False


def _examples(data: dict[str, Any], codec: TextCodec) -> list[Example]:
    """Returns the first rows with their prompts."""
    settings = validate(DataSettings, data | {"limit": _MEASURED_ROWS}, "DATA")
    return load_dataset(settings, codec, field="DATA").examples


def _judge(answers: Sequence[Any]) -> str:
    """Returns the builtin reward that compares such answers."""
    texts = [str(answer) for answer in answers]
    if any("\\boxed" in text or "\\fbox" in text for text in texts):
        return "math"
    marked = [text for text in texts if "####" in text]
    if marked:
        return "gsm8k" if all(final_number(text) is not None for text in marked) else "math"
    if any(re.search(r"\\[a-zA-Z]|\$", text) for text in texts):
        return "math"
    if several := sum("\n" in text.strip() for text in texts):
        _log.warning(
            f"{several:,} of the first {len(texts):,} answers span several lines, and exact_match "
            "compares them as a whole: a reward function of your own, or reward.answer_pattern "
            "with data.extract, may work better"
        )
    return "exact_match"


def _sizes(longest: int, most: int | None) -> dict[str, int]:
    """Returns the sizes for prompts of at most `longest` tokens and a model that holds `most`."""
    # In steps of 64 tokens.
    length = -(-(longest + _MAX_TOKENS) // 64) * 64
    if most is not None:
        length = min(length, most)
    if length <= longest:
        raise ConfigError(
            f"DATA: a prompt has {longest} tokens, and the model holds {most} with the response"
        )
    return {
        "longest": longest,
        "max_model_len": length,
        "max_tokens": min(_MAX_TOKENS, length - longest),
    }


def _text(
    request: Request,
    file: Path,
    data: dict[str, Any],
    sizes: dict[str, int],
    row: dict[str, Any] | None,
    judge: str,
) -> str:
    folder = file.absolute().parent

    def placed(path: str) -> str:
        """Returns a path as seen from the file's folder; a name of the Hub as it is."""
        return os.path.relpath(path, folder) if Path(path).exists() else path

    data = {
        key: placed(value) if key in ("jsonl", "parquet") else value for key, value in data.items()
    }
    environment = Environment(
        loader=PackageLoader("tandem.cli", "."),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("run_template.jinja").render(
        file=file,
        name=file.stem if file.stem != "run" else folder.name,
        model=placed(request.model),
        junior=request.junior and placed(request.junior),
        columns=row,
        data=dump_values(data),
        judge=judge,
        measured=_MEASURED_ROWS,
        **sizes,
    )
