"""The methods of the contract by the role that they ask for."""

from __future__ import annotations

from google.protobuf import descriptor_pool

from tandem._proto.types.v1 import access_pb2
from tandem.rpc import calls as _calls  # noqa: F401  (makes the services known to the pool)

ROLES = ("reader", "user", "admin")


def methods_of(service: str) -> dict[str, str]:
    """Returns the role of every method, "/package.Service/Method", of a service."""
    roles = {
        method.name: method.GetOptions().Extensions[access_pb2.required_role]
        for method in descriptor_pool.Default().FindServiceByName(service).methods
    }
    return {
        f"/{service}/{name}": access_pb2.Role.Name(role).removeprefix("ROLE_").lower()
        for name, role in roles.items()
    }
