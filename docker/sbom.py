"""Prints the bill of materials of an image, as CycloneDX JSON, from the package lists that it has.

python sbom.py NAME VERSION --dpkg DIR [--wheels FILE] [--site-packages DIR] [--model WHEEL]

A wheel is written NAME==VERSION.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL


def main() -> None:
    """Prints the bill of the image that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("--dpkg", type=Path, required=True, help="the image's /var/lib/dpkg")
    parser.add_argument("--wheels", type=Path, help="list of wheels that libraries were taken from")
    parser.add_argument("--site-packages", type=Path, help="installed Python packages")
    parser.add_argument("--model", help="wheel that the image's model was taken from")
    options = parser.parse_args()

    components = list(debian_packages(options.dpkg))
    if options.wheels:
        components += [wheel(line) for line in options.wheels.read_text().split()]
    if options.site_packages:
        components += python_packages(options.site_packages)
    if options.model:
        components.append(wheel(options.model, ComponentType.MACHINE_LEARNING_MODEL))
    image = Component(
        name=options.name,
        version=options.version,
        type=ComponentType.CONTAINER,
        licenses=[LicenseFactory().make_from_string("Apache-2.0")],
    )
    bom = Bom(metadata=BomMetaData(component=image), components=components)
    bom.register_dependency(image, components)
    print(make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2))


def debian_packages(database: Path) -> Iterator[Component]:
    """Yields the Debian packages that are installed according to dpkg's database."""
    form = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"
    command = ["dpkg-query", f"--admindir={database}", "--show", f"--showformat={form}"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        status, name, version, architecture = line.split("\t")
        if status.startswith("ii"):
            qualifiers = {"arch": architecture, "distro": "debian-12"}
            purl = PackageURL("deb", "debian", name, version, qualifiers)
            yield Component(name=name, version=version, purl=purl, bom_ref=str(purl))


def python_packages(folder: Path) -> Iterator[Component]:
    """Yields the Python packages that are installed in a folder."""
    for one in distributions(path=[str(folder)]):
        component = wheel(f"{one.metadata['Name']}=={one.version}")
        if expression := one.metadata["License-Expression"]:
            component.licenses = [LicenseFactory().make_from_string(expression)]
        yield component


def wheel(line: str, kind: ComponentType = ComponentType.LIBRARY) -> Component:
    """Returns the component of a wheel that is written NAME==VERSION."""
    name, _, version = line.partition("==")
    purl = PackageURL("pypi", None, name, version)
    return Component(name=name, version=version, type=kind, purl=purl, bom_ref=str(purl))


if __name__ == "__main__":
    main()
