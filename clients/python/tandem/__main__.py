"""The entry point of the `tandem` command, which handles Ctrl-C during the imports."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Runs the command line; Ctrl-C while it is imported ends the process without a traceback."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from tandem.cli.app import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
