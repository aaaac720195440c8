"""docs/operations/security.md names the roles, settings and variables that the code has."""

from __future__ import annotations

import re

from check_layers import REPOSITORY
from roles import ROLES, methods_of
from tandem.rpc.credentials import FIELDS, variable

PAGE = (REPOSITORY / "docs/operations/security.md").read_text()


def roles_of_the_contract():
    """The names of the methods by role."""
    found = {role: set() for role in ROLES}
    for file in sorted((REPOSITORY / "proto").glob("tandem/**/*.proto")):
        text = file.read_text()
        package = re.search(r"^package (.*);", text, re.M)[1]
        for service in re.findall(r"^service (\w+)", text, re.M):
            for path, role in methods_of(f"{package}.{service}").items():
                found[role].add(path.rpartition("/")[2])
    assert all(found.values())
    return found


def test_the_table_of_roles_is_that_of_the_contract():
    rows = re.findall(r"^\| (reader|user|admin) +\| (.*) \|$", PAGE, re.M)
    documented = {role: set(re.findall(r"`(\w+)`", methods)) for role, methods in rows}
    assert documented == roles_of_the_contract()


def test_settings_and_variables_exist():
    schema = (REPOSITORY / "proto/tandem/config/v1/server_config.proto").read_text()
    named = set(re.findall(r"`server\.((?:tls\.|tokens\.)?\w+)(?::[^`]*)?`", PAGE))
    assert len(named) > 8
    for setting in named - {"crt", "key"}:
        assert re.search(rf"\b{setting.rpartition('.')[2]} = \d+;", schema), setting
    for field in FIELDS:
        assert f"`{variable(field)}`" in PAGE
        assert f"`--{field.replace('_', '-')}`" in PAGE


def test_metrics_exist():
    names = (REPOSITORY / "common/rpc/metrics/metric_names.h").read_text()
    mentioned = re.findall(r"`(tandem_\w+)", PAGE)
    assert mentioned
    for name in mentioned:
        assert f'"{name}"' in names
