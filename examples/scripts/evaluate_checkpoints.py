"""Evaluates every checkpoint of a run: accuracy, or what the junior makes of the answers, by step.

    python examples/scripts/evaluate_checkpoints.py RUN_DIR [dotted.key=value ...]

The run's own settings decide the servers, the prompts (`eval.data`) and the reward; the overrides
change them. One checkpoint alone: `tandem eval RUN.yaml --checkpoint PATH`.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from tandem import RunSettings
from tandem.evaluation import evaluate
from tandem.session.opening import open_session
from tandem.settings import loading

# Numbers of evals.jsonl; each mode has some of them.
SHOWN = ("accuracy", "junior/nats_per_token", "gap/nats_per_token")


def main(run_dir: str, *overrides: str) -> None:
    """Loads each checkpoint into the trainer, publishes it and prints its evaluations."""
    run = Path(run_dir)
    config = loading.load(RunSettings, run / "config.yaml", overrides)
    checkpoints = sorted(path for path in (run / "checkpoints").glob("step_*") if path.is_dir())
    # The session logs its messages: they go to the error stream.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with open_session(config, purpose="eval") as session:
        for checkpoint in checkpoints:
            session.trainer.load_checkpoint(str(checkpoint))
            # The rollout servers may hold a newer version, of the checkpoint before.
            session.publish(allow_rollback=True)
            for mode, evaluation in evaluate(session).items():
                summary = evaluation.summary()
                numbers = [f"{key} {summary[key]:.3f}" for key in SHOWN if key in summary]
                print(checkpoint.name, mode, *numbers, sep="\t", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    options = parser.parse_args()
    main(options.run_dir, *options.overrides)
