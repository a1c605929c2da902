import pytest
import torch

from atlas_fl.client.batching import Dropout, collate_packed, dropout_masks
from atlas_fl.client.draws import Draws

CPU = torch.device("cpu")


def source(client: str, *path: object, seed: int = 1) -> Dropout:
    return Dropout(p=0.25, draws=Draws(client=client, seed=seed, secret=None), path=path)


def test_a_mask_drops_its_share_and_keeps_the_mean() -> None:
    mask = dropout_masks([source("a-0", 1, 0)], device=CPU)
    assert mask is not None
    drawn = mask(0, "module", (400, 50))
    assert drawn.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert float((drawn == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(drawn.mean()) == pytest.approx(1, abs=0.02)


def test_a_mask_depends_on_seed_path_and_module_and_not_on_the_pack() -> None:
    own = source("a-0", 1, 0)
    alone, packed = dropout_masks([own], device=CPU), dropout_masks([source("b-0", 1, 0), own], device=CPU)
    expected = alone(0, "m", (6, 8))
    assert torch.equal(packed(1, "m", (6, 8)), expected)
    assert torch.equal(alone(0, "m", (6, 8)), expected), "a second look draws the same"
    others = [
        packed(0, "m", (6, 8)),
        alone(0, "n", (6, 8)),
        dropout_masks([source("a-0", 2, 0)], device=CPU)(0, "m", (6, 8)),
        dropout_masks([source("a-0", 1, 0, seed=2)], device=CPU)(0, "m", (6, 8)),
    ]
    assert not any(torch.equal(other, expected) for other in others)


def test_a_row_by_hand(tiny_of, site_of, spec_of) -> None:
    specs = [spec_of(name="a-0", words=(1, 1), examples=2), spec_of(name="b-0", words=(2, 2), examples=1)]
    site = site_of(tiny_of("bert"), *specs)
    parts = [site.data[spec.name].splits["train"] for spec in specs]
    row = collate_packed(parts, device=CPU)
    # [CLS] word [SEP], twice, and [CLS] word word [SEP]
    assert row.segments == (range(0, 6), range(6, 10))
    assert row.pooled == (range(0, 2), range(2, 3))
    assert row.counts == (2, 1)
    assert row.ids.tolist() == [*parts[0].ids, *parts[1].ids]
    assert row.layout.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
