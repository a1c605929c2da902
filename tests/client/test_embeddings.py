"""Embeddings of texts against the stock model's hidden states, and the fingerprints made of them."""

import dataclasses

import numpy as np
import pytest
import torch

from atlas_fl.client.embeddings import embed
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.fingerprint import FIRST, SECOND, fingerprint
from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, TrainOptions
from atlas_fl.clustering.fingerprints import FINGERPRINTS, WITHOUT_GRADIENTS, is_centred
from atlas_fl.clustering.sketch import sketch
from atlas_fl.errors import ConfigError


def mean_states(tiny, ids: np.ndarray, types: np.ndarray) -> torch.Tensor:
    """The mean last hidden state of one text by the stock model, alone and without packing."""
    named = {"input_ids": torch.from_numpy(ids)[None]}
    named |= {"token_type_ids": torch.from_numpy(types)[None]} if tiny.backbone.family.token_types else {}
    stock = getattr(tiny.stock(2), tiny.backbone.family.prefix)
    with torch.no_grad():
        return stock(**named).last_hidden_state[0].mean(0)


def texts_of(examples) -> list[tuple[np.ndarray, np.ndarray]]:
    ends = zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
    return [(examples.ids[start:stop], examples.types[start:stop]) for start, stop in ends]


def test_an_embedding_is_the_mean_last_hidden_state_of_the_stock_model(tiny, site_of, spec_of) -> None:
    site = dataclasses.replace(site_of(tiny, spec_of(name="a-0", labels=3, examples=11, pairs=True)), max_tokens=40)
    examples = site.data["a-0"].splits["train"]
    expected = torch.stack([mean_states(tiny, *text) for text in texts_of(examples)])
    torch.testing.assert_close(embed(examples, site), expected, atol=1e-5, rtol=1e-4)


def test_of_a_text_to_write_the_prompt_alone_counts(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("gpt2")
    site = site_of(tiny, spec_of(name="a-0", labels=3, examples=9))
    whole = site.data["a-0"].splits["train"]
    mask = np.zeros(len(whole.ids), dtype=bool)
    mask[whole.offsets[1:] - 1] = True
    asked = dataclasses.replace(whole, target_mask=mask)
    assert {len(ids) > 2 for ids, _ in texts_of(whole)} == {True, False}, "of two tokens the second follows nothing"
    prompts = [(ids[:-1], types[:-1]) if len(ids) > 2 else (ids, types) for ids, types in texts_of(whole)]
    expected = torch.stack([mean_states(tiny, *prompt) for prompt in prompts])
    torch.testing.assert_close(embed(asked, site), expected, atol=1e-5, rtol=1e-4)
    everything = np.ones(len(whole.ids), dtype=bool)
    everything[whole.offsets[:-1]] = False
    torch.testing.assert_close(embed(dataclasses.replace(whole, target_mask=everything), site), embed(whole, site))


def test_a_model_of_the_stock_path_is_refused_in_one_line(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("bert")
    site = site_of(tiny, spec_of(name="a-0", labels=3, examples=5))
    family = dataclasses.replace(tiny.backbone.family, stock=True)
    on_stock_path = dataclasses.replace(site, backbone=dataclasses.replace(tiny.backbone, family=family))
    with pytest.raises(ConfigError, match="runs through the stock path; take another --fingerprint, --client-parts 1"):
        embed(site.data["a-0"].splits["train"], on_stock_path)


def test_a_fingerprint_is_the_sketch_of_the_mean_embedding_of_either_half(tiny_of, site_of, spec_of) -> None:
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", labels=3, examples=7)
    site = site_of(tiny, spec)
    train = TrainOptions(seed=2, batch_size=3, lr=5e-3)
    options = FingerprintOptions(kind="embedding", sketch_dim=64, train=train, batches=2, steps=6)
    (found,) = fingerprint([Job(client="a-0", params=tiny.params(spec), round=0, options=options)], site)
    means = [mean_states(tiny, *text) for text in texts_of(site.data["a-0"].splits["train"])]
    for name, half in ((FIRST, means[::2]), (SECOND, means[1::2])):
        expected = sketch({"embedding": torch.stack(half).mean(0)}, dim=64, seed=2)
        np.testing.assert_allclose(found.params[name].numpy(), expected, atol=1e-5)
    assert found.metrics["agreement"] == pytest.approx(float(found.params[FIRST] @ found.params[SECOND]))
    assert {key for key in found.params if not key.startswith("sketch.")} == set(tiny.params(spec))
    scored = Job(client="a-0", params=tiny.params(spec), round=0, options=EvaluateOptions(split="train"))
    assert found.metrics["loss"] == evaluate([scored], site)[0].metrics["loss"]


def test_sketches_of_what_all_clients_share_are_centred() -> None:
    """Means of embeddings, like Fisher information, differ from client to client by little of their length."""
    assert [kind for kind in (*FINGERPRINTS, *WITHOUT_GRADIENTS) if is_centred(kind)] == ["fisher", "embedding"]
