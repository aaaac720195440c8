"""The training loop of the agents beside it, which learns from sessions of `tandem serve-openai`.

One step: episodes of an agent, whose rewards it posts → one update of the senior → its new weights
to the rollout server. Copy and change it.

`--resume` goes on from the last checkpoint. With `--sessions`, the base URL of a server that
outlives the loop, it learns again from the sessions that had ended since that checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loop import command_line
from tandem import RolloutClient, SessionsClient, TrainerClient, policy_samples
from tandem.errors import SessionsError
from tandem.sessions import FinishedSession

OBJECTIVE = {"advantage_estimator": "group_relative", "junior_token_loss_weight": 0.0}
SHOWN = ("reward/mean", "tokens/response", "policy/grad_norm")


@dataclass(frozen=True)
class Saved:
    """The state that a loop continues from, in the file state.json beside its checkpoints.

    Attributes:
        run_id: of the loop, which its requests name.
        step: the last step that the checkpoint holds.
        cursor: behind the last session that it was trained on; None before the first.
        checkpoint: its directory; None for the base model.
    """

    run_id: str
    step: int = 0
    cursor: str | None = None
    checkpoint: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """Reads the file in `folder`."""
        return cls(**json.loads((folder / "state.json").read_text()))

    def write(self, folder: Path) -> None:
        """Replaces the file in `folder`, at once."""
        (folder / "state.json.new").write_text(json.dumps(asdict(self)))
        (folder / "state.json.new").replace(folder / "state.json")


def train_on_sessions(
    name: str, draw: Callable[[dict[str, str], SessionsClient, int], object], episodes: int
) -> None:
    """Trains, and saves checkpoints in runs/NAME.

    `draw(served, sessions, step)` lets an agent work on the tasks of a step, in `episodes`
    sessions with ids that nothing had before: `served` has the `base_url` and the `model` that it
    calls, `sessions` takes the rewards. All seeds of a group differ.
    """
    options = arguments()
    folder = Path("runs") / name
    with (
        RolloutClient(options.rollout) as rollout,
        TrainerClient(options.trainer) as trainer,
        openai_server(options) as served,
    ):
        sessions = SessionsClient(served["base_url"])
        if options.resume:
            saved = Saved.read(folder)
            cursor = known(sessions, saved.cursor)
        else:
            saved = Saved(run_id=f"{name}-{uuid.uuid4().hex[:8]}")
            cursor = behind_all(sessions, None)
        if saved.checkpoint is None:
            weights = trainer.load_base_model()
        else:
            weights = trainer.load_checkpoint(saved.checkpoint)
        trainer.publish([rollout], allow_rollback=True)
        for step in range(saved.step + 1, options.steps + 1):
            # A loop that ended after its checkpoint had drawn these.
            finished = sessions.finished(cursor, count=episodes)
            if len(finished) < episodes:
                # It ended while it drew the step, which is drawn again as a whole.
                cursor = behind_all(sessions, cursor)
                draw(served, sessions, step)
                finished = sessions.finished(cursor, count=episodes, wait_seconds=600)
            cursor = finished[-1].cursor
            report = trainer.train_step(
                policy_samples(sorted(finished, key=place)),
                run_id=saved.run_id,
                step=step,
                expected_version=weights.version,
                objective=OBJECTIVE,
                request_id=f"{saved.run_id}/{step}",
            ).report
            weights = report.weights
            trainer.publish([rollout])
            print(f"step {step}", *(f"{key} {report.metrics[key]:.4f}" for key in SHOWN), sep="  ")
            if step % options.save_every == 0 or step == options.steps:
                # The checkpoint before, which state.json still names, is kept until the next save.
                path = trainer.save_checkpoint(
                    str(folder), f"step_{step:06d}", keep=2, expected_version=weights.version
                )
                saved = replace(saved, step=step, cursor=cursor, checkpoint=path)
                saved.write(folder)
                # Sessions that the checkpoint has learnt from need not be kept.
                sessions.drop(cursor)
        print(saved.checkpoint)


def place(session: FinishedSession) -> tuple[str, int]:
    """The place of a session in its step: agents end in any order, and ids are random."""
    return session.group_id, session.trajectories[0].seed


def behind_all(sessions: SessionsClient, cursor: str | None) -> str | None:
    """Returns the cursor behind all finished sessions, from which the loop does not learn."""
    while held := sessions.finished(cursor, count=256):
        cursor = held[-1].cursor
    return cursor


def known(sessions: SessionsClient, cursor: str | None) -> str | None:
    """Returns a saved cursor; None if the server has started since, with no sessions."""
    try:
        sessions.finished(cursor)
    except SessionsError as error:
        if error.code != "cursor_unknown":
            raise
        return None
    return cursor


@contextmanager
def openai_server(options: Namespace) -> Iterator[dict[str, str]]:
    """Yields `base_url` and `model` of --sessions, or of a `tandem serve-openai` that it runs."""
    if options.sessions is not None:
        with urllib.request.urlopen(f"{options.sessions}/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        yield {"base_url": options.sessions, "model": model}
        return
    command = [sys.executable, "-m", "tandem", "serve-openai", "--port", "0", "--json"]
    with subprocess.Popen(
        [*command, "--rollout", options.rollout], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
        finally:
            server.terminate()


def arguments() -> Namespace:
    """Reads the command line."""
    options = command_line()
    options.add_argument("--sessions", metavar="BASE_URL", help="a running `tandem serve-openai`")
    options.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    options.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return options.parse_args()
