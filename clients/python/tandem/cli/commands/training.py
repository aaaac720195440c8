"""`tandem train`, `sft`, `dpo`, `reward-model`, `eval`: the commands that read a run file."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from tandem.cli.command_line import EXIT_INTERRUPTED, EXIT_UNTRAINED, JsonFlag, app, command
from tandem.cli.commands.options import DryRun, Overrides, RunFile
from tandem.errors import ConfigError, LostWeightsError
from tandem.rpc.credentials import NO_CREDENTIALS, Credentials
from tandem.run_directory.log import FILE_ONLY
from tandem.settings import loading
from tandem.settings.run import EvalMode, RunSettings
from tandem.settings.values import dump_values
from tandem.terminal.output import Output, lasting_output
from tandem.terminal.progress import progress_shown
from tandem.terminal.steps import StepDisplay
from tandem.utils.interrupt import Interrupt
from tandem.utils.progress import Progress

_log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from tandem.rpc.client import TrainerClient
    from tandem.session.session import Session
    from tandem.settings.run import Purpose

Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue after the last checkpoint. `--resume auto` starts a new run if there is "
        "none.",
    ),
]

ResumeAuto = Annotated[bool, typer.Option("--resume-auto", hidden=True)]

Clean = Annotated[bool, typer.Option("--clean", help="Discard an earlier run in run_dir.")]

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        help="A setting that a resumed run may change, or a section of settings "
        "(cluster.trainer); may be repeated.",
        metavar="KEY",
    ),
]

WaitForLock = Annotated[
    float,
    typer.Option(
        "--wait-for-lock",
        help="Longest wait, in seconds, for another process that still uses run_dir.",
        metavar="SECONDS",
        min=0.0,
    ),
]

DiscardUnsaved = Annotated[
    bool,
    typer.Option("--discard-unsaved", help="Discard updates that are in no checkpoint."),
]


CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint, or run directory (its last one), to load into the trainer and publish "
        "first. Default: the weights currently served.",
        metavar="PATH|RUN_DIR",
    ),
]


class TrainingCommand(TyperCommand):
    """A command whose flag `--resume` may be followed by `auto`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Joins the two words before the parser reads them."""
        plain: list[str] = []
        for word in args:
            if word == "auto" and plain and plain[-1] == "--resume":
                plain[-1] = "--resume-auto"
            else:
                plain.append("--resume-auto" if word == "--resume=auto" else word)
        return super().parse_args(ctx, plain)


def add_training(
    kind: Purpose,
    summary: str,
    *,
    group: typer.Typer = app,
    name: str | None = None,
    implied: Sequence[str] = (),
    check: Callable[[RunSettings], None] = lambda settings: None,
    check_trainer: Callable[[TrainerClient], None] | None = None,
) -> None:
    """Adds the command `name`, by default `kind`, which trains in a run directory of that kind.

    `implied` are overrides that come before the user's. `check` raises ConfigError for settings
    that the command cannot run, and `check_trainer` for a trainer that the run does not start.
    """

    @command(group, name=name or kind, help=summary, cls=TrainingCommand)
    def run_training(
        run_file: RunFile,
        overrides: Overrides = None,
        resume: Resume = False,
        resume_auto: ResumeAuto = False,
        clean: Clean = False,
        change: Changes = None,
        discard_unsaved: DiscardUnsaved = False,
        wait_for_lock: WaitForLock = 0.0,
        dry_run: DryRun = False,
        credentials: Credentials = NO_CREDENTIALS,
        as_json: JsonFlag = False,
    ) -> None:
        from tandem.run_directory.directory import RunDirectory
        from tandem.run_directory.mirror import restore_run
        from tandem.session.opening import open_session
        from tandem.training.loop import train, train_supervised
        from tandem.training.preferences import train_preferences
        from tandem.training.reward_models import train_reward_model

        output = Output(as_json=as_json)
        overrides = [*implied, *(overrides or [])]
        settings = load_run(run_file, overrides, credentials, dry_run=dry_run)
        check(settings)
        open_run = functools.partial(
            RunDirectory.open,
            settings,
            kind,
            resume="auto" if resume_auto else resume,
            clean=clean,
            changes=change or (),
            wait_seconds=wait_for_lock,
        )
        if dry_run:
            show_preflight(output, settings, kind, open_run, check_trainer)
            return
        loop = {
            "train": train,
            "sft": train_supervised,
            "dpo": train_preferences,
            "reward-model": train_reward_model,
        }[kind]
        mirror = settings.checkpoint.upload
        if mirror is not None and (resume or resume_auto):
            restored = restore_run(settings.run_dir, mirror)
            if restored is not None:
                output.note(restored)

        def train_in(run: RunDirectory, stop: Interrupt) -> int:
            """Trains to the end, or until the run is asked to stop; returns the exit code."""
            summary = {"run_dir": str(run.path), "run_id": run.run_id}
            if run.done:
                summary["last_step"] = run.first_step - 1
                text = f"all steps are done already: {run.account}\nrun directory: {run.path}"
                output.result(summary | run.account.record(), text)
                return EXIT_UNTRAINED if run.account.trained_nothing else 0
            progress = Progress()
            with (
                open_session(settings, purpose=kind, progress=progress) as session,
                StepDisplay(
                    output,
                    run.first_step,
                    session.settings.steps,
                    run.elapsed_seconds,
                    progress,
                ) as display,
            ):
                steps = session.settings.steps
                if session.settings.cluster is None and check_trainer is not None:
                    check_trainer(session.trainer)
                last = loop(session, run, display.step, stop, discard_unsaved=discard_unsaved)
                summary |= {"last_step": last, **run.account.record()}
                _log.info(f"{run.account}", extra=FILE_ONLY)
                text = f"{display.waiting()}\n{run.account}\nrun directory: {run.path}"
                output.result(summary, text)
            if stop.requested and last < steps:
                output.note(f"stopped after step {last}; --resume continues")
                return EXIT_INTERRUPTED
            return EXIT_UNTRAINED if run.account.trained_nothing else 0

        note = "stopping after this step; press Ctrl-C again to stop at once"
        with (
            lasting_output(),
            output.shows_log(),
            Interrupt(lambda: output.note(note)) as stop,
        ):
            code, saved = None, 0
            while code is None:
                with open_run() as run:
                    try:
                        code = train_in(run, stop)
                    except LostWeightsError as error:
                        # The run goes on by itself as long as it gets further.
                        if stop.requested or run.state is None or run.state.step <= saved:
                            raise
                        saved = run.state.step
                        output.note(
                            f"{error.message}: going on from the checkpoint of step {saved}"
                        )
                open_run = functools.partial(open_run, resume=True, clean=False)
        if code:
            raise typer.Exit(code)


add_training("train", "Train with tandem policy gradients.")
add_training("sft", "Train with supervision, on the rows' answers or the senior's own responses.")


def _require_unfrozen(settings: RunSettings) -> None:
    """Raises ConfigError if the trainer of the run's own cluster trains only a speculator."""
    section = (settings.cluster and settings.cluster.trainer) or {}
    if section.get("freeze_base_model"):
        raise ConfigError("cluster.trainer.freeze_base_model: a speculator does not learn pairs")


def _require_unfrozen_trainer(trainer: TrainerClient) -> None:
    """Raises ConfigError if a running trainer trains only a speculator."""
    info = trainer.info()
    if info.has_speculator and not info.HasField("optimizer"):
        raise ConfigError(
            f"servers.trainer: the trainer at {trainer.address} trains only a speculator, which "
            "does not learn pairs"
        )


add_training(
    "dpo",
    "Train on pairs of a chosen and a rejected response: DPO and its relatives.",
    check=_require_unfrozen,
    check_trainer=_require_unfrozen_trainer,
)
add_training("reward-model", "Train a reward model, which a critic server is, on such pairs.")


@command(name="eval")
def evaluate_command(
    run_file: RunFile,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Comma-separated evaluations: {', '.join(get_args(EvalMode))}; may be repeated. "
            "Default: the run file's eval.modes."
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="New directory for the answers: a Parquet file for each evaluation, which "
            "`tandem view FILE --tokenizer DIR` shows.",
            metavar="DIR",
        ),
    ] = None,
    gate: Annotated[
        bool,
        typer.Option(
            "--gate",
            help="Instead of the evaluations: what the reward favours before training, by author "
            "and by eval.patterns, in answers that are drawn as a run draws its responses.",
        ),
    ] = False,
    discard_unsaved: DiscardUnsaved = False,
    dry_run: DryRun = False,
    credentials: Credentials = NO_CREDENTIALS,
    as_json: JsonFlag = False,
) -> None:
    """Measure the senior on held-out prompts.

    solo: accuracy and pass@k of the senior by itself; junior_solo: of the
    junior; tandem: of both, as in training. handoff: the same when senior and
    junior take turns, as eval.handoff_boundary sets. legibility: the junior's
    cross-entropy over the senior's solo answers. junior_takeover: accuracy
    when the junior finishes what the senior began, as eval.takeover sets;
    senior_takeover: the other way round.

    --checkpoint leaves its weights in the trainer and the rollout servers; the
    next run still begins with the base model.
    """
    from tandem.evaluation import evaluate
    from tandem.evaluation.answers import held_out
    from tandem.evaluation.gate import as_in_training
    from tandem.evaluation.gate import gate as measure_gate
    from tandem.evaluation.report import gate_rows, measures, size
    from tandem.run_directory.trajectories.writer import write_parquet
    from tandem.utils.new_directory import new_directory

    output = Output(as_json=as_json)
    overrides = overrides or []
    if mode:
        modes = [name.strip() for names in mode for name in names.split(",")]
        if unknown := next((name for name in modes if name not in get_args(EvalMode)), None):
            known = ", ".join(get_args(EvalMode))
            raise ConfigError(f"--mode: must be one of {known}, not {unknown!r}")
        overrides = [*overrides, f"eval.modes=[{', '.join(modes)}]"]
    settings = load_run(run_file, overrides, credentials, dry_run=dry_run)
    path = found_checkpoint(checkpoint, settings)
    if dry_run:
        show_preflight(output, settings, "eval")
        return
    if gate:
        if mode or answers:
            raise ConfigError(f"--gate: goes without {'--mode' if mode else '--answers'}")
        with evaluated_session(
            output, as_in_training(settings), "eval", checkpoint, discard_unsaved=discard_unsaved
        ) as session:
            found = measure_gate(session)
        title = "answers to the held-out prompts, drawn as in training"
        columns = ("", "share", "accuracy", "reward", "tokens", "one reward")
        for finding in found.findings():
            output.note(finding)
        output.result(found.record(), output.table(title, columns, gate_rows(found)))
        return
    folder = nullcontext() if answers is None else new_directory(answers)
    with (
        folder as place,
        evaluated_session(
            output, settings, "eval", checkpoint, discard_unsaved=discard_unsaved
        ) as session,
    ):
        results = evaluate(session)
        summaries = {name: result.summary() for name, result in results.items()}
        if place is not None:
            for name, result in results.items():
                kept = result.responses(held_out(session), session.codec)
                write_parquet(place / f"{name}.parquet", kept)
    [first, *_] = summaries.values()
    title = f"{size(first)}; senior version {first['version/senior']}, {weights_source(path)}"
    rows = [
        (f"{name}: {one.name}", one.value, one.interval)
        for name, summary in summaries.items()
        for one in measures(summary)
    ]
    output.result(
        {"checkpoint": path and str(path), "evaluations": summaries},
        output.table(title, ("", "value", "95 % interval"), rows),
    )


def load_run(
    run_file: Path, overrides: Sequence[str] | None, credentials: Credentials, *, dry_run: bool
) -> RunSettings:
    """Returns the settings of a run file, with the overrides and the options of credentials.

    A `dry_run` fetches no weights from the Hub.
    """
    paths = [f"credentials.{key}={json.dumps(path)}" for key, path in credentials.record().items()]
    return loading.load(RunSettings, run_file, [*(overrides or []), *paths], weights=not dry_run)


@contextmanager
def evaluated_session(
    output: Output,
    settings: RunSettings,
    purpose: Purpose,
    checkpoint: Path | None,
    *,
    discard_unsaved: bool,
) -> Iterator[Session]:
    """Opens the session of an evaluation, with a checkpoint in its servers if one is named."""
    from tandem.session.opening import open_session
    from tandem.training.start import serve_checkpoint

    progress = Progress()
    with (
        output.shows_log(),
        open_session(settings, purpose=purpose, progress=progress) as session,
        progress_shown(output, progress),
    ):
        if checkpoint is not None:
            with progress.phase("load"):
                serve_checkpoint(session, checkpoint, discard_unsaved=discard_unsaved)
        yield session


def weights_source(checkpoint: Path | None) -> str:
    """Returns where the weights of an evaluation are from, for its title."""
    return "as currently served" if checkpoint is None else f"from {checkpoint}"


def found_checkpoint(checkpoint: Path | None, settings: RunSettings) -> Path | None:
    """Returns the trainer's directory that the option --checkpoint names, if it is given.

    Raises ConfigError where the run's own cluster would not find it.
    """
    from tandem.run_directory.checkpoints import checkpoint_at, require_here

    if checkpoint is None:
        return None
    found = checkpoint_at(checkpoint)
    if settings.cluster is not None:
        require_here(found, "--checkpoint")
    return found.trainer


def show_preflight(
    output: Output,
    settings: RunSettings,
    purpose: Purpose,
    open_run: Callable[[], AbstractContextManager[Any]] = nullcontext,
    check_trainer: Callable[[TrainerClient], None] | None = None,
) -> None:
    """Checks all that a run needs; prints the settings in force and the sizes that follow.

    `check_trainer` is called for a trainer that the run does not start.
    """
    from tandem.preflight.problems import Problems
    from tandem.session.opening import check_run

    problems = Problems()
    with problems.collect(), open_run():
        pass
    config = settings.model_dump(mode="json")
    config["servers"] = {"timeout_seconds": settings.servers.timeout_seconds}
    if settings.cluster is None:
        del config["cluster"]
    with (
        problems.collect(),
        # With the notes as comments the output stays YAML.
        output.shows_log("# "),
    ):
        checked = check_run(settings, purpose=purpose, check_trainer=check_trainer)
        settings = checked.settings
        config |= checked.in_force | {"steps": settings.steps}
    problems.raise_any()
    derived = settings.derived()
    text = dump_values(config) + "# derived\n"
    text += "".join(f"# {name}: {value}\n" for name, value in derived.items())
    output.result({"config": config, "derived": derived}, text)
