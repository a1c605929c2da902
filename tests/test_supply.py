"""What is installed: lock files with the hash of every file, the tools for them, the bill of materials."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from atlas_fl.storage.assets import assets
from tools import audit_dependencies, install, lock, sbom

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PINS = lock.read_pins(ROOT / "constraints.txt")
HOSTS = re.compile(
    "|".join([r"pypi\.(?:org|io)", r"python(?:hosted)\.org", r"hugging" r"face\.co\b", r"download\.py" r"torch\.org"])
    + r"|\bhf\.co\b|conda\.(?:io|org)|tuna\.tsinghua"
)


@cache
def locked(path: Path) -> lock.Hashes:
    return lock.read_lock(path, PINS)


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_pin_is_locked_with_hashes_and_nothing_else_is() -> None:
    names = {name for path in LOCKS for name in locked(path)}
    assert names == set(PINS)
    entry = re.compile(r"^([\w.-]+)==(\S+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", re.MULTILINE)
    for path in LOCKS:
        lines = entry.findall(path.read_text("utf-8"))
        assert dict(lines) == {name: PINS[name] for name in locked(path)}
        assert len(lines) == path.read_text(encoding="utf-8").count("==")


def test_a_package_has_the_same_hashes_in_every_set() -> None:
    hashes: dict[str, set[str]] = {}
    for path in LOCKS:
        for name, values in locked(path).items():
            assert hashes.setdefault(name, values) == values


@pytest.mark.parametrize("group", lock.read_roots(ROOT / "pyproject.toml"))
def test_each_set_of_requirements_has_a_lock_file(group: str) -> None:
    there = {*locked(ROOT / "requirements" / f"{group}.txt"), *locked(ROOT / "requirements" / "base.txt")}
    roots = lock.read_roots(ROOT / "pyproject.toml")[group]
    assert {canonicalize_name(Requirement(text).name) for text in roots} <= there


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_what_a_locked_package_needs_is_locked_too(path: Path) -> None:
    """By the metadata of what is installed here; extras of extras are `tools.lock`'s to follow."""
    there = {*locked(path), *locked(ROOT / "requirements" / "base.txt")}
    for name in locked(path):
        for text in requires(name):
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                pinned = PINS.get(canonicalize_name(needed.name), "none")
                assert canonicalize_name(needed.name) in there, f"{name} needs {text}"
                assert needed.specifier.contains(pinned), f"{name} needs {text}, pinned is {pinned}"


def requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def test_only_wheels_are_installed_but_for_what_has_none() -> None:
    for path in LOCKS:
        options = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("--")]
        built = {"base": ["rouge-score"], "lm-eval": ["sqlitedict", "word2number"]}.get(path.stem, [])
        assert options == ["--only-binary :all:", *(f"--no-binary {name}" for name in built)]


def test_nothing_is_installed_without_its_hash() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [line for line in makefile.splitlines() if "pip install" in line and "--require-hashes" not in line] == []
    assert "--require-hashes" in install.LOCKED and "--no-deps" in install.LOCKED
    assert {"--no-deps", "--no-build-isolation", str(ROOT)} <= set(install.PROJECT)


@pytest.mark.slow
def test_no_index_and_no_hub_is_named_in_the_repository() -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    named = [name for name in files.split("\0") if name and not (ROOT / name).is_symlink() and (ROOT / name).is_file()]
    assert named, "git lists no file"
    assert [name for name in named if HOSTS.search((ROOT / name).read_bytes().decode("utf-8", "ignore"))] == []


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of no code, in a folder that pip takes for its only index."""
    (tmp_path / "index").mkdir()
    path = written_wheel(tmp_path / "index", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def written_wheel(folder: Path, version: str) -> Path:
    path = folder / f"tiny_atlas_test-{version}-py3-none-any.whl"
    info = f"tiny_atlas_test-{version}.dist-info"
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-atlas-test\nVersion: {version}\n")
        kind = "Wheel-Version: 1.0\nGenerator: atlas\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", kind)
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def installed(wheel: Path, digest: str) -> Path:
    """The folder that a lock file with this one hash installs the wheel into."""
    file, target = wheel.parents[1] / "lock.txt", wheel.parents[1] / "target"
    file.write_text(f"--only-binary :all:\ntiny-atlas-test==1.0 \\\n    --hash=sha256:{digest}\n", encoding="utf-8")
    install.run_pip([*install.LOCKED, "--target", str(target), "--requirement", str(file)])
    return target


def test_a_file_with_the_locked_hash_is_installed(wheel: Path) -> None:
    assert list(installed(wheel, sha256(wheel.read_bytes()).hexdigest()).glob("tiny_atlas_test*"))


@pytest.mark.parametrize("constraint", ["", "tiny-atlas-test<=2"])
@pytest.mark.parametrize("label", ["cpu", ""])
def test_a_build_is_taken_by_its_label_where_it_is_offered(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, label: str, constraint: str
) -> None:
    constraints = wheel.parents[1] / "constraints.txt"
    constraints.write_text(constraint, encoding="utf-8")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    files = [wheel, *([written_wheel(wheel.parent, f"1.0+{label}")] if label else [])]
    target, lock_file = wheel.parents[1] / "target", wheel.parents[1] / "lock.txt"
    hashes = "".join(f" \\\n    --hash=sha256:{sha256(file.read_bytes()).hexdigest()}" for file in files)
    lock_file.write_text(
        f"--only-binary :all:\ntiny-atlas-test==1.0{hashes}\nother==2 \\\n    --hash=sha256:00\n", "utf-8"
    )
    monkeypatch.setattr(install, "LOCKED", [*install.LOCKED, "--target", str(target)])
    assert install.install_build(lock_file, name="tiny-atlas-test", label="cpu") is bool(label)
    assert [path.name for path in target.glob("*.dist-info")] == (
        ["tiny_atlas_test-1.0+cpu.dist-info"] if label else []
    )


def test_a_file_with_another_hash_is_refused_in_one_line_with_the_remedy(wheel: Path) -> None:
    digest = sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(SystemExit) as ended:
        installed(wheel, "0" * 64)
    (line,) = str(ended.value).splitlines()
    assert line.startswith("tiny-atlas-test==1.0 was not installed: file:") and digest in line and "make lock" in line
    assert not list(wheel.parents[1].glob("target/tiny_atlas_test*"))


@pytest.mark.parametrize(
    ("requires", "lacks"),
    [
        (["filelock", 'optree; extra == "optree"'], False),
        (["filelock", 'no-such-cuda-lib==1; platform_system != "none"'], True),
        (["filelock", 'no-such-cuda-lib==1; platform_system == "none"'], False),
        (["filelock", 'Typing_Extensions; python_version >= "3"'], False),
        (None, False),
    ],
)
def test_cuda_is_installed_where_the_build_of_torch_asks_for_it(
    requires: list[str] | None, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.metadata, "requires", lambda _: requires)
    assert install.lacks_cuda() is lacks


def test_the_base_comes_with_every_set_and_the_project_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[list[str]] = []
    monkeypatch.setattr(install, "run_pip", done.append)
    monkeypatch.setattr(install, "lacks_cuda", lambda: False)
    install.main(["dev"])
    files = [[Path(word).stem for word in words if word.endswith(".txt")] for words in done]
    assert files == [["build"], ["base", "dev"], [], []]
    assert done[2:] == [install.PROJECT, ["check"]]


def test_a_wheel_takes_the_place_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[list[str]] = []
    monkeypatch.setattr(install, "run_pip", done.append)
    monkeypatch.setattr(install, "lacks_cuda", lambda: False)
    install.main(["dist/atlas.whl", "base"])
    assert done[2:] == [[*install.WHEEL, "dist/atlas.whl"], ["check"]]


def link(filename: str, digest: str = "ab" * 32) -> SimpleNamespace:
    return SimpleNamespace(filename=filename, hash=digest, hash_name="sha256", is_file=False)


def test_every_wheel_of_the_version_that_a_supported_machine_can_use_is_locked() -> None:
    kept = [
        "fast-1.2-cp311-cp311-manylinux_2_28_x86_64.whl",
        "fast-1.2-cp313-cp313-macosx_11_0_arm64.whl",
        "fast-1.2-cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl",
        "fast-1.2-py2.py3-none-any.whl",
        "fast-1.2+cpu-cp312-cp312-linux_x86_64.whl",
    ]
    others = [
        "fast-1.2-cp311-cp311-win_amd64.whl",
        "fast-1.2-cp310-cp310-manylinux_2_28_x86_64.whl",
        "fast-1.2-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl",
        "fast-1.2.1-py3-none-any.whl",
        "faster-1.2-py3-none-any.whl",
        "fast-1.2.tar.gz",
        "fast-1.2-dev1.odd.whl",
        "fast-1.2.exe",
    ]
    assert list(lock.offered_files("fast", "1.2", [link(name) for name in kept + others])) == kept


def test_a_source_archive_is_locked_where_there_is_no_wheel() -> None:
    offered = [link("old-3.tar.gz"), link("old-2-py3-none-any.whl")]
    assert lock.offered_files("old", "3", offered) == {"old-3.tar.gz": "ab" * 32}
    with pytest.raises(SystemExit, match="offers no file of old==4"):
        lock.offered_files("old", "4", [link("old-3.tar.gz")])


def test_a_file_without_a_sha256_at_its_index_is_hashed_in_a_folder_and_refused_elsewhere(wheel: Path) -> None:
    here = SimpleNamespace(filename=wheel.name, hash_name=None, is_file=True, file_path=str(wheel))
    offered = lock.offered_files("tiny-atlas-test", "1.0", [here])
    assert offered == {wheel.name: sha256(wheel.read_bytes()).hexdigest()}
    far = SimpleNamespace(filename=wheel.name, hash_name="md5", hash="0", is_file=False)
    with pytest.raises(SystemExit, match=f"no SHA-256 of {wheel.name}"):
        lock.offered_files("tiny-atlas-test", "1.0", [far])


def test_a_closure_follows_extras_and_the_markers_of_every_supported_machine() -> None:
    packages = {
        "a": {"requires_dist": ["b[x]>=1", "w; sys_platform == 'win32'", "m; sys_platform == 'darwin'"]},
        "b": {"requires_dist": ["c; extra == 'x'", "d; extra == 'y'", "e; python_version < '3.12'"]},
        "c": {"requires_dist": ["a"]},
        "e": {},
        "m": {},
    }
    assert lock.closure(["a"], packages) == {"a", "b", "c", "e", "m"}
    with pytest.raises(SystemExit, match="d is needed"):
        lock.closure(["d"], packages)


def test_a_lock_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    hashes = {"one": {"a" * 64, "b" * 64}, "two": {"c" * 64}}
    offered = {"one": {"one-1-py3-none-any.whl": "a" * 64}, "two": {"two-2.tar.gz": "c" * 64}}
    text = lock.lock_text(hashes, {"one": "1", "two": "2"}, offered)
    assert "--no-binary two" in text and "--no-binary one" not in text
    path = tmp_path / "lock.txt"
    path.write_text(text, encoding="utf-8")
    assert lock.read_lock(path, {"one": "1", "two": "2"}) == hashes
    assert lock.read_lock(path, {"one": "1.1", "two": "2"}) == {"two": {"c" * 64}}, "another version, other files"


@cache
def bill() -> dict[str, object]:
    return json.loads((ROOT / "sbom.json").read_text(encoding="utf-8"))


def libraries() -> Iterator[dict[str, object]]:
    return (component for component in bill()["components"] if component["type"] == "library")


def test_the_bill_of_materials_is_cyclonedx() -> None:
    assert (bill()["bomFormat"], bill()["specVersion"], bill()["version"]) == ("CycloneDX", "1.5", 1)
    assert bill()["metadata"]["component"]["version"] == project()["version"]
    references = [component["bom-ref"] for component in bill()["components"]]
    assert len(set(references)) == len(references)
    for component in bill()["components"]:
        assert {"type", "name", "purl", "licenses", "scope"} <= component.keys()


def test_the_bill_of_materials_lists_what_is_locked() -> None:
    listed = {canonicalize_name(one["name"]): one for one in libraries()}
    assert {name: one["version"] for name, one in listed.items()} == PINS
    hashes = {name: values for path in LOCKS for name, values in locked(path).items()}
    assert {name: {entry["content"] for entry in one["hashes"]} for name, one in listed.items()} == hashes
    base = locked(ROOT / "requirements" / "base.txt")
    assert {name for name, one in listed.items() if one["scope"] == "required"} == set(base)


def test_the_bill_of_materials_lists_the_files_of_fetched_models_and_data() -> None:
    listed = {one["bom-ref"].removeprefix("atlas-fetch:"): one for one in bill()["components"] if "components" in one}
    parts = assets()
    assert {
        name: {file["name"]: file["hashes"][0]["content"] for file in one["components"]} for name, one in listed.items()
    } == {name: dict(part.package_files) for name, part in parts.items()}
    for name, one in listed.items():
        assert one["properties"][0]["value"] == (parts[name].note or sbom.PART_ORIGIN)


OF_LM_EVAL = {"chardet", "dominate"}
"""Under the LGPL, of the extra lm-eval alone: imported unaltered by what that brings, and not passed on."""


def test_every_licence_is_known_and_no_required_one_binds_what_uses_it() -> None:
    for one in libraries():
        (licence,) = one["licenses"]
        text = licence.get("expression") or licence["license"].get("id") or licence["license"]["name"]
        choices = re.split(r" or ", text, flags=re.IGNORECASE)
        binds = all(re.search(r"GPL|SSPL|BUSL", choice) for choice in choices)
        assert not binds or one["name"] in OF_LM_EVAL, one["name"]
        if one["scope"] == "required":
            assert text != sbom.NOT_STATED and "LicenseRef" not in text, one["name"]
    silent = [one["name"] for one in libraries() if one["licenses"] == [{"license": {"name": sbom.NOT_STATED}}]]
    # an empty package of NVIDIA's, which asks for its libraries, one whose licence is a file, of BSD-3-Clause, and one
    # of lm-eval's, which is MIT by its archive
    assert silent == ["cuda-toolkit", "torchao", "word2number"]
    assert locked(ROOT / "requirements" / "lm-eval.txt").keys() - locked(LOCKS[0]).keys() >= OF_LM_EVAL


def test_the_licence_of_a_package_is_its_own_word() -> None:
    assert sbom.licence_of({"license_expression": "MIT OR Apache-2.0"}) == {"expression": "MIT OR Apache-2.0"}
    assert sbom.licence_of({"license": "Apache 2.0"}) == {"license": {"id": "Apache-2.0"}}
    classifier = "License :: OSI Approved :: BSD License"
    assert sbom.licence_of({"classifier": [classifier]}) == {"license": {"name": "BSD License"}}
    assert sbom.licence_of({}) == {"license": {"name": sbom.NOT_STATED}}


def test_an_audit_that_looked_nothing_up_does_not_pass() -> None:
    skipped = {"name": "a", "skip_reason": "not found"}
    clean = {"name": "b", "version": "1", "vulns": []}
    known = {"name": "c", "version": "2", "vulns": [{"id": "X-1", "fix_versions": ["3"]}]}
    conclude = audit_dependencies.conclusion
    assert conclude("", "ConnectionError: no route")[1] == 2
    assert "Nothing was checked" in conclude(json.dumps({"dependencies": [skipped]}), "")[0]
    assert conclude(json.dumps({"dependencies": [skipped]}), "")[1] == 2
    assert conclude(json.dumps({"dependencies": [skipped, clean]}), "")[1] == 2
    assert conclude(json.dumps({"dependencies": [clean]}), "") == ("1 packages, 0 known vulnerabilities", 0)
    text, code = conclude(json.dumps({"dependencies": [known, clean]}), "")
    assert (code, text.splitlines()[0]) == (1, "c 2: X-1, mended in 3")


def test_the_project_has_its_licence_is_installed_editable_and_make_lints_and_tests_it() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert project()["license"] == "Apache-2.0" and project()["license-files"] == ["LICENSE"]
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    installed = json.loads(metadata.distribution("atlas-fl").read_text("direct_url.json") or "{}")
    assert installed["dir_info"] == {"editable": True}
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^(\w+):[^\n]*\n((?:\t[^\n]*\n)+)", makefile, re.MULTILINE))
    tools = ("ruff check", "ruff format --check", "mypy", "lint-imports", "python -m tools.code_lines")
    assert {line.strip() for line in recipes["lint"].splitlines()} == {f"$(BIN)/{tool}" for tool in tools}
    assert "$(PYTEST)" in recipes["unit"]
