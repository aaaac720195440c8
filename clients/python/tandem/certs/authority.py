"""A small certificate authority, certificates and tokens for a trial (`tandem certs`)."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import ConfigError, file_error
from tandem.rpc.certificate_directory import ROLES, CertificateDirectory
from tandem.utils.new_directory import new_directory
from tandem.utils.optional import optional_module

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# Names by which this machine calls its own servers; every server's certificate has them.
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_CLIENT = "tandem-client"
_CA_DAYS = 3650
# A machine whose clock is a little behind must not take a new certificate for one of the future.
_CLOCK_SKEW = datetime.timedelta(hours=1)
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class Request:
    """The certificates to make.

    Attributes:
        hosts: names and IP addresses at which servers are called, in addition to LOOPBACK.
        client: name of the client in its certificate; None: tandem-client, or the name so far.
        days: days until the certificates of server and client expire.
    """

    hosts: Sequence[str] = ()
    client: str | None = None
    days: int = 90


def make_certificates(directory: Path, request: Request) -> CertificateDirectory:
    """Writes a new authority, certificates of server and client, and a token of each role.

    Raises ConfigError for a directory that is not empty, and for names that a certificate cannot
    hold.
    """
    x509 = _x509()
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("tandem trial CA")
    public = key.public_key()
    certificate = _signed(
        _builder(name, name, public, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True),
        public,
        key,
    )
    with new_directory(directory) as temporary:
        temporary.chmod(0o700)
        _write(temporary / "ca.crt", _pem(certificate))
        _write(temporary / "ca.key", _key_pem(key))
        for role in ROLES:
            _write(temporary / f"{role}.token", f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode())
        _issue_both(temporary, request, certificate, key)
    return CertificateDirectory(directory.absolute())


def renew_certificates(directory: Path, request: Request) -> CertificateDirectory:
    """Replaces the certificates of server and client, and their keys, under the same authority.

    The names are those of the certificates so far, unless the request has others. Raises
    ConfigError if the directory lacks a file, or holds one that is damaged.
    """
    x509 = _x509()
    from cryptography.hazmat.primitives import serialization

    try:
        authority = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
        before = {
            name: x509.load_pem_x509_certificate((directory / f"{name}.crt").read_bytes())
            for name in ("server", "client")
        }
    except OSError as error:
        raise file_error(error.filename, error) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{directory}: a certificate or key is damaged: {error}") from None
    names = before["server"].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [str(one.value) for one in names]
    [client] = before["client"].subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    name = str(client.value) if request.client is None else request.client
    renewed = Request(request.hosts or hosts, name, request.days)
    _issue_both(directory, renewed, authority, key)
    return CertificateDirectory(directory.absolute())


def _issue_both(directory: Path, request: Request, authority: x509.Certificate, key: Any) -> None:
    """Writes server.crt, server.key, client.crt and client.key."""
    x509 = _x509()
    usages = x509.ExtendedKeyUsageOID
    client = _CLIENT if request.client is None else request.client
    hosts = [_host(one) for one in dict.fromkeys((*request.hosts, *LOOPBACK))]
    # A server is a client of other servers: a trainer publishes weights and asks its critic.
    both = [usages.SERVER_AUTH, usages.CLIENT_AUTH]
    pairs = {
        "server": _issued("tandem-server", hosts, both, request.days, authority, key),
        "client": _issued(client, [], [usages.CLIENT_AUTH], request.days, authority, key),
    }
    for name, (certificate, own_key) in pairs.items():
        _write(directory / f"{name}.key", own_key)
        _write(directory / f"{name}.crt", certificate)


def _issued(
    name: str,
    hosts: Sequence[x509.GeneralName],
    usages: Sequence[x509.ObjectIdentifier],
    days: int,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> tuple[bytes, bytes]:
    """Returns a certificate that the authority signs, and its private key."""
    x509 = _x509()
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    issuer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(_name(name), authority.subject, public, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False
        )
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return _pem(_signed(builder, public, authority_key)), _key_pem(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    x509 = _x509()
    now = datetime.datetime.now(datetime.UTC)
    try:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=days))
        )
    except (OverflowError, ValueError) as error:
        raise ConfigError(f"--days {days}: {error}") from None


def _signed(
    builder: x509.CertificateBuilder, public: ec.EllipticCurvePublicKey, key: Any
) -> x509.Certificate:
    x509 = _x509()
    from cryptography.hazmat.primitives import hashes

    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    return builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return _x509().KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    x509 = _x509()
    try:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
    except ValueError as error:
        raise ConfigError(f"--client {text!r}: {error}") from None


def _host(text: str) -> x509.GeneralName:
    x509 = _x509()
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not text or any(
        not (letter.isascii() and letter.isalnum()) and letter not in "-._*" for letter in text
    ):
        raise ConfigError(f"--host {text!r}: must be a host name or an IP address, without a port")
    return x509.DNSName(text)


def _write(path: Path, data: bytes) -> None:
    """Replaces a file in one step; only its owner may read it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600, exist_ok=False)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise file_error(path, error) from None


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _x509() -> Any:
    optional_module("cryptography", "certs")
    return optional_module("cryptography.x509", "certs")
