"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="dotted.key=value overrides; later ones win.", metavar="KEY=VALUE"),
]

RunFile = Annotated[Path, typer.Argument(help="Run configuration (YAML).", metavar="RUN.yaml")]

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check all that a run needs, print the settings in force, and exit."
    ),
]

RolloutAddress = Annotated[
    str | None,
    typer.Option(
        "--rollout",
        help="Address of the rollout server. Default: the first one of the cluster that "
        "`tandem up` runs, else 127.0.0.1:7701.",
    ),
]

TokenizerOption = Annotated[
    Path | None, typer.Option(help="Directory with tokenizer.json. Default: the server's model.")
]

SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        help="Source of drafts: none, ngram, junior or heads. By the exact rule responses are the "
        "same; they may be written faster. Default: none.",
        metavar="METHOD",
    ),
]

AcceptanceRuleOption = Annotated[
    str | None,
    typer.Option(
        help="Condition under which a draft is accepted: exact, or rejection_sampling, which keeps "
        "the distribution of the responses alone. Default: exact.",
        metavar="RULE",
    ),
]
