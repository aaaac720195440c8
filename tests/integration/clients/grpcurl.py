"""grpcurl's command line over `buf curl`, for the commands of docs/reference/grpcurl.md.

grpcurl is on neither Debian nor PyPI, buf is: it makes the same calls by the same reflection, with
other flags. The flags, the output and the exit codes here are those of grpcurl as far as the page
uses them; another flag is an error.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import grpc
from google.protobuf import any_pb2, json_format
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2  # noqa: F401  (json_format finds its messages)
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

BUF = Path(sys.executable).with_name("buf")
# grpcurl adds it to the code of a call that failed.
CODE_OFFSET = 64
# The names of scalar types in a proto file, by number.
SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line; all flags stand before the address, as grpcurl wants it."""
    parser = argparse.ArgumentParser(prog="grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true")
    parser.add_argument("-emit-defaults", action="store_true")
    parser.add_argument("-expand-headers", action="store_true")
    for flag in ("-cacert", "-cert", "-key", "-import-path", "-proto", "-d"):
        parser.add_argument(flag)
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def header(text: str, *, expand: bool) -> str:
    """Returns a header, with `${NAME}` replaced by variables of the environment if they expand."""
    return re.sub(r"\$\{(\w+)\}", lambda found: os.environ[found[1]], text) if expand else text


def buf_flags(options: argparse.Namespace) -> list[str]:
    """The flags of `buf curl` for the connection and the headers."""
    flags = ["--protocol", "grpc"]
    for name in ("cacert", "cert", "key"):
        if value := getattr(options, name):
            flags += [f"--{name}", value]
    # A header of -H goes to the reflection service, too.
    for text in options.H:
        value = header(text, expand=options.expand_headers)
        flags += ["-H", value]
        if not options.proto:
            flags += ["--reflect-header", value]
    if options.proto:
        flags += ["--schema", f"{options.import_path}/{options.proto}"]
    return flags


def call(options: argparse.Namespace, url: str) -> int:
    """Makes a call and prints its answers as they come; returns the exit code."""
    command = [BUF, "curl", *buf_flags(options), url]
    if options.emit_defaults:
        command.append("--emit-defaults")
    if options.d is not None:
        command += ["-d", "@-" if options.d == "@" else options.d]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode < 8:
        sys.stderr.write(done.stderr)
        return done.returncode
    print_error(json.loads(done.stderr))
    return CODE_OFFSET + done.returncode // 8


def print_error(error: dict) -> None:
    """Prints an error of buf as grpcurl does, with its details as JSON."""
    code = "".join(word.capitalize() for word in error["code"].split("_"))
    print(f"ERROR:\n  Code: {code}\n  Message: {error['message']}", file=sys.stderr)
    for number, detail in enumerate(error.get("details", ()), start=1):
        if number == 1:
            print("  Details:", file=sys.stderr)
        packed = any_pb2.Any(
            type_url=f"type.googleapis.com/{detail['type']}",
            value=base64.b64decode(detail["value"] + "=="),
        )
        text = json.dumps(json_format.MessageToDict(packed), indent=2)
        lines = text.replace("\n", "\n    \t")
        print(f"  {number})\t{lines}", file=sys.stderr)


def list_services(options: argparse.Namespace, url: str) -> int:
    """Prints the services of a server."""
    return subprocess.run([BUF, "curl", *buf_flags(options), "--list-services", url]).returncode


def reflected(address: str) -> DescriptorPool:
    """The definitions that a server without TLS tells."""
    return DescriptorPool(ProtoReflectionDescriptorDatabase(grpc.insecure_channel(address)))


def list_methods(address: str, service: str) -> int:
    """Prints the methods of a service."""
    methods = reflected(address).FindServiceByName(service).methods
    print(*sorted(method.full_name for method in methods), sep="\n")
    return 0


def describe(address: str, symbol: str) -> int:
    """Prints the definition of a service, of one of its methods, or of a message."""
    pool = reflected(address)
    parent, _, name = symbol.rpartition(".")
    if name.endswith("Service"):
        methods = sorted(pool.FindServiceByName(symbol).methods, key=lambda method: method.name)
        lines = [f"  {method_text(method)}" for method in methods]
        print(f"{symbol} is a service:\nservice {name} {{", *lines, "}", sep="\n")
    elif parent.endswith("Service"):
        method = pool.FindServiceByName(parent).methods_by_name[name]
        print(f"{symbol} is a method:\n{method_text(method)}")
    else:
        fields = sorted(pool.FindMessageTypeByName(symbol).fields, key=lambda field: field.number)
        lines = [f"  {field_text(field)}" for field in fields]
        print(f"{symbol} is a message:\nmessage {name} {{", *lines, "}", sep="\n")
    return 0


def method_text(method: MethodDescriptor) -> str:
    """The line of a method in a proto file."""
    takes = f"{'stream ' * method.client_streaming}.{method.input_type.full_name}"
    gives = f"{'stream ' * method.server_streaming}.{method.output_type.full_name}"
    return f"rpc {method.name} ( {takes} ) returns ( {gives} );"


def field_text(field: FieldDescriptor) -> str:
    """The line of a field, outside of any oneof of several fields, in a proto file."""
    kind = field.message_type or field.enum_type
    name = f".{kind.full_name}" if kind else SCALARS[field.type]
    optional = field.has_presence and field.message_type is None
    label = "repeated " if field.is_repeated else "optional " * optional
    return f"{label}{name} {field.name} = {field.number};"


def main(arguments: list[str]) -> int:
    """Runs a command of grpcurl; returns its exit code."""
    options = parse(arguments)
    address, *words = options.words
    url = f"{'http' if options.plaintext else 'https'}://{address}"
    if words == ["list"]:
        return list_services(options, url)
    if words[0] == "list":
        return list_methods(address, words[1])
    if words[0] == "describe":
        return describe(address, words[1])
    [method] = words
    return call(options, f"{url}/{method}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
