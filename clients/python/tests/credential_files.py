"""Certificates and tokens that tests show to servers, and the bytes that travel."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tandem import Credentials
from tandem.certs.authority import CertificateDirectory


def read(directory: CertificateDirectory, name: str) -> bytes:
    """The contents of a file of the directory."""
    return Path(directory.file(name)).read_bytes()


def token(directory: CertificateDirectory, role: str = "admin") -> str:
    """The token of a role."""
    return read(directory, f"{role}.token").decode().strip()


def with_ca(directory: CertificateDirectory, authority: CertificateDirectory) -> Credentials:
    """Credentials whose client trusts another authority."""
    return Credentials(authority.file("ca.crt")).or_else(directory.client())


def expired(directory: CertificateDirectory, name: str, seconds: float = -86400) -> tuple[str, str]:
    """Issues NAME-expired.key and .crt by the authority of the directory; returns their names.

    The certificate expires `seconds` from now.
    """
    authority = x509.load_pem_x509_certificate(read(directory, "ca.crt"))
    authority_key = serialization.load_pem_private_key(read(directory, "ca.key"), None)
    key = ec.generate_private_key(ec.SECP256R1())
    valid = x509.load_pem_x509_certificate(read(directory, f"{name}.crt"))
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(valid.subject)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(seconds=seconds))
    )
    for extension in valid.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    names = f"{name}-expired.key", f"{name}-expired.crt"
    files = [Path(directory.file(one)) for one in names]
    encoding = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[0].write_bytes(key.private_bytes(encoding, form, plain))
    files[1].write_bytes(builder.sign(authority_key, hashes.SHA256()).public_bytes(encoding))
    return names


@contextmanager
def tapped(target: str | None = None) -> Iterator[tuple[str, bytearray]]:
    """Yields an address, and the bytes that come in there; `target` gets them, if there is one."""
    seen = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, sink: socket.socket | None, tap: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                tap.extend(data)
                if sink is not None:
                    sink.sendall(data)
        for one in (source, sink):
            if one is not None:
                one.close()

    def start(*arguments: object) -> None:
        threading.Thread(target=copy, args=arguments, daemon=True).start()

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = None
                if target is not None:
                    host, _, port = target.rpartition(":")
                    server = socket.create_connection((host, int(port)))
                    start(server, client, bytearray())
                start(client, server, seen)

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}", seen
