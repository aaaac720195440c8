"""How far the trainer is in the step that a run waits for."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from tandem.errors import RpcError
from tandem.rpc.client import CriticClient, TrainerClient
from tandem.utils.progress import Progress

# Between two questions; a shorter step is not asked about.
_SECONDS = 2.0


class StepProgress:
    """Asks the trainer while a step runs, and tells a Progress; a context manager.

    `client` makes no second attempts. A trainer that does not answer is not asked again sooner: the
    call of the step says what is wrong.
    """

    def __init__(self, client: TrainerClient | CriticClient, progress: Progress) -> None:
        self._client = client
        self._progress = progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()  # what it tells belongs to this phase

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            try:
                info = self._client.info()
            except RpcError:
                continue
            # A critic does not tell.
            if count := getattr(info, "micro_batches", 0):
                self._progress.counted(info.micro_batches_done, count)
