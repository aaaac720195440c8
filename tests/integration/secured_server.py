"""A rollout server with TLS, client certificates and tokens, and the files of its clients."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
from tandem.cluster.local import find_binary

TOKEN = "secret-of-a-user"


@contextmanager
def serve(models: harness.Models, directory: Path) -> Iterator[str]:
    """Serves at the yielded address; writes ca.crt, client.crt, client.key and user.token.

    One certificate, which signs itself, is that of the authority, the server and the client.
    """
    directory.mkdir(exist_ok=True)
    authority, certificate, key, token = (
        directory / name for name in ("ca.crt", "client.crt", "client.key", "user.token")
    )
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    name = "-subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", key, "-out", certificate]
    subprocess.run([*f"{command} {name}".split(), *files], check=True, capture_output=True)
    key.chmod(0o600)
    authority.write_bytes(certificate.read_bytes())
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    settings = {
        "senior_model": models.senior,
        "junior_model": models.junior,
        "max_model_len": 128,
        "compute.num_threads": 1,
        "server.grpc_port": 0,
        "server.metrics_port": 0,
        "server.tls.certificate_file": certificate,
        "server.tls.private_key_file": key,
        "server.tls.ca_file": authority,
        "server.tokens.user_file": token,
    }
    arguments = [f"{key}={value}" for key, value in settings.items()]
    server = [find_binary("tandem-rollout-server"), *arguments]
    with (
        (directory / "server.log").open("w") as log,
        subprocess.Popen(server, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            yield f"127.0.0.1:{json.loads(process.stdout.readline())['grpc_port']}"
        finally:
            process.terminate()
            process.wait(30)
