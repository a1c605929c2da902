"""Install sets of `requirements/` into this Python, every file checked by its SHA-256, and the project itself.

    .venv/bin/python -m tools.install base dev        what `make setup` and `make demo` run
    PYTHON -m tools.install dist/NAME.whl base        the same for another Python, with a wheel in the project's place

First come the tools that install and build, then the sets, without a resolver, since the lock files name everything
that is needed. Nothing is installed of which any file has another hash. Reads the standard library alone until then.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# Python compiles the few modules that are imported; where it may not write what it compiled, pip compiles all of them
COMPILED = [] if sys.dont_write_bytecode else ["--no-compile"]
LOCKED = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--require-hashes", *COMPILED]
PROJECT = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
WHEEL = ["install", "--quiet", "--no-deps"]
MISMATCH = re.compile(r"^\s+(?P<pin>\S+==\S+)[^\n]* from (?P<url>\S+).*?Got\s+(?P<hash>[0-9a-f]{64})", re.M | re.S)


def main(words: Sequence[str]) -> None:
    """Install the base and the sets; ends the process with a line where a file is not the one that was locked.

    A word that ends in `.whl` is a file to install in the place of the sources here.
    """
    groups = [word for word in words if not word.endswith(".whl")]
    wheels = [word for word in words if word.endswith(".whl")]
    run_pip([*LOCKED, *_files(["build"])])
    install_build(ROOT / "requirements" / "base.txt", name="torch", label="cpu")
    run_pip([*LOCKED, *_files(dict.fromkeys(("base", *groups)))])
    if lacks_cuda():
        run_pip([*LOCKED, *_files(["cuda"])])
    run_pip([*WHEEL, *wheels] if wheels else PROJECT)
    run_pip(["check"])


def _files(groups: Iterable[str]) -> list[str]:
    return [word for group in groups for word in ("--requirement", str(ROOT / "requirements" / f"{group}.txt"))]


def install_build(lock: Path, *, name: str, label: str) -> bool:
    """Install this build of a package where an index or a folder has it; return whether it is installed now.

    Asked for by its label, because pip prefers a file whose hash an index states to one in a folder, whatever its
    version: of two builds that are locked it would take the public one, which comes with gigabytes of CUDA.
    """
    (locked,) = re.findall(rf"^{name}==\S+(?: \\\n\s+--hash=\S+)+$", lock.read_text(encoding="utf-8"), re.M)
    pin, _, hashes = locked.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "build.txt"
        file.write_text(f"--only-binary :all:\n{pin}+{label} {hashes}\n", encoding="utf-8")
        done = _run([*LOCKED, "--requirement", str(file)])
    # the second where pip's settings have a constraint for it; one that the public build breaks, too, ends that install
    lacking = (f"No matching distribution found for {pin}+{label}", f"Cannot install {pin}+{label} because")
    if any(words in done.stderr for words in lacking):
        return False
    _end_on_fault(done)
    return True


def run_pip(words: list[str]) -> None:
    """Run pip; a file with another hash ends the process with one line, and what else pip says is shown as it is."""
    _end_on_fault(_run(words))


def _run(words: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PIP, *words], capture_output=True, text=True, check=False)


def _end_on_fault(done: "subprocess.CompletedProcess[str]") -> None:
    if done.returncode and (mismatch := MISMATCH.search(done.stderr)):
        raise SystemExit(mismatch_line(**mismatch.groupdict()))
    sys.stderr.write(done.stderr)
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise SystemExit(done.returncode)


def mismatch_line(pin: str, url: str, hash: str) -> str:
    """The remedy for a file that is not the one that was locked, in one line."""
    return (
        f"{pin} was not installed: {url} has the SHA-256 {hash}, which requirements/ does not list; a file that was"
        " altered looks like this, and so does another build of the same version. Use the index that the lock was made"
        " with, or, if you trust this one, list what it offers with `make lock` and look at the difference"
    )


def lacks_cuda() -> bool:
    """Return whether the installed build of torch lacks packages of `requirements/cuda.txt` that it needs."""
    importlib.invalidate_caches()
    from packaging.requirements import Requirement

    needed = map(Requirement, metadata.requires("torch") or [])
    installed = {_plain(distribution.name) for distribution in metadata.distributions()}
    required = {
        _plain(requirement.name)
        for requirement in needed
        if requirement.marker is not None and requirement.marker.evaluate({"extra": ""})
    }
    return not required <= installed


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
