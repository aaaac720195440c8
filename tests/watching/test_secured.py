"""Prometheus scrapes servers with TLS, client certificates and tokens; alerts about those fire."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import harness
import pytest
import shipped
from credential_files import expired
from monitor import Monitor, has_data, wait_until
from tandem import Credentials
from tandem.certs.authority import Request, make_certificates
from tandem.errors import UnauthenticatedError
from tandem.rpc.client import RolloutClient

DAY = 86400


@pytest.fixture(scope="module")
def monitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    """The monitor of a secured cluster whose certificate expires in ten days, after a bad token."""
    directory = tmp_path_factory.mktemp("secured")
    certs = make_certificates(directory / "certs", Request())
    for made in expired(certs, "server", seconds=10 * DAY):
        shutil.copy(certs.file(made), certs.file(made.replace("-expired", "")))
    models = harness.make_models(directory / "models")
    with (
        harness.cluster(directory / "cluster", models, trainer={}, certs=certs.path) as running,
        Monitor(
            directory, running.servers, config="prometheus-tls.yml", secrets=certs.path
        ) as watching,
    ):
        wait_until(lambda: len(watching.query("up == 1")) == len(running.servers))
        bad_token = directory / "bad.token"
        bad_token.write_text("a-token-that-no-server-knows\n")
        credentials = Credentials(token_file=str(bad_token)).or_else(certs.client())
        with (
            RolloutClient(running.rollouts[0].address, credentials=credentials) as client,
            pytest.raises(UnauthenticatedError),
        ):
            client.info()
        yield watching


@pytest.mark.parametrize(
    ("alert", "servers"),
    [("TandemDenials", {"rollout"}), ("TandemCertificateExpires", {"rollout", "trainer"})],
)
def test_the_alert_fires(monitor, alert, servers):
    wait_until(lambda: {(alert, server) for server in servers} <= monitor.fired())
    assert {server for name, server in monitor.fired() if name == alert} == servers


def test_the_panels_of_access_have_data(monitor):
    access = [q for q in shipped.queries() if "tandem_auth" in q.text or "certificate" in q.text]
    assert len(access) == 2
    for query in access:
        assert has_data(monitor.query(query.with_variables())), query
