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
        "--dry-run",
        help="Check everything that a run needs, print the settings in force, and exit.",
    ),
]

TrainerAddress = Annotated[
    str | None,
    typer.Option(
        "--trainer",
        help="Address of the trainer. Default: the one in the cluster that `tandem up` runs, "
        "else 127.0.0.1:7702.",
        metavar="HOST:PORT",
    ),
]

RolloutAddress = Annotated[
    str | None,
    typer.Option(
        "--rollout",
        help="Address of the rollout server. Default: the first one in the cluster that `tandem "
        "up` runs, else 127.0.0.1:7701.",
    ),
]

TokenizerOption = Annotated[
    Path | None, typer.Option(help="Directory with tokenizer.json. Default: the server's model.")
]

SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        help="Source of drafts: none, ngram, junior or heads. With the exact rule the responses "
        "are the same; only the speed differs. Default: none.",
        metavar="METHOD",
    ),
]

AcceptanceRuleOption = Annotated[
    str | None,
    typer.Option(
        help="When to accept a draft: exact, or rejection_sampling, which preserves only the "
        "distribution of the responses. Default: exact.",
        metavar="RULE",
    ),
]
