"""Pages of the service that this server refuses, each with the reason."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tandem.openai_server.errors import RequestError
from tandem.openai_server.pages import Endpoint

_CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"
_FILES = (
    "a checkpoint is a directory of the trainer's file system, below --checkpoints; take its files "
    "from there"
)
_OWNERS = "checkpoints have no owners; every client of this server may load them"
_ACCOUNTS = "this server has no accounts"
_PROJECTS = "this server has no projects"
_COPIES = "load the checkpoint, and save it under another name"
_LOSSES = "the SDK runs a loss of its client (forward_backward_custom with a callable)"

# By method and path.
PAGES = {
    ("GET", f"{_CHECKPOINT}/archive"): _FILES,
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): _FILES,
    ("POST", f"{_CHECKPOINT}/publish"): _OWNERS,
    ("DELETE", f"{_CHECKPOINT}/publish"): _OWNERS,
    ("POST", "save_weights_external"): _FILES,
    ("POST", "copy_weights"): _COPIES,
    ("POST", "create_custom_loss"): _LOSSES,
    ("PUT", "sessions/{session}/project"): _PROJECTS,
    ("POST", "sessions/search"): _PROJECTS,
    ("GET", "sessions/{session}/trace_export"): "sessions have no traces",
    ("GET", "audit"): _ACCOUNTS,
    ("GET", "billing/usage/events"): _ACCOUNTS,
    ("GET", "billing/usage/checkpoints/current"): _ACCOUNTS,
}


def refusal(page: str, why: str) -> Endpoint:
    """Returns the endpoint of a page that is refused."""
    name = page.rpartition("}/")[2]

    async def refuse(request: Request) -> Response:
        raise RequestError(f"{name}: is not served: {why}", code="unsupported_parameter")

    return refuse
