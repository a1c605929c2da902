"""Against the closed form of softmax regression, worked out by hand, and against one backward pass an example."""

import numpy as np
import pytest
import torch
from torch import nn

from atlas_fl.errors import DataError, ModelError
from atlas_fl.sparse.fisher import draw_label, fisher_scores, label_uniforms


def softmax_regression(params, inputs):
    return inputs @ params["w"].mT + params["b"]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


REGRESSION = {"w": drawn(0, 3, 4), "b": drawn(1, 3)}


def test_one_example_by_hand() -> None:
    """Two classes with equal logits: p = 1/2, so d log p_0 / d w_0 = (1 - 1/2) x and d log p_0 / d w_1 = -x / 2."""
    params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    words = {"names": ["w", "b"], "targets": torch.tensor([0])}
    found = fisher_scores(softmax_regression, params, inputs=torch.tensor([[2.0, 6.0]]), **words)
    assert found["w"].tolist() == [[1.0, 9.0], [1.0, 9.0]]
    assert found["b"].tolist() == [0.25, 0.25]


def test_the_closed_form_of_softmax_regression() -> None:
    """d log p_y / d w_cj = (1[c = y] - p_c) x_j, so F_cj = sum_n (1[c = y_n] - p_nc)^2 x_nj^2."""
    inputs, seed = drawn(2, 50, 4), 7
    p = softmax_regression(REGRESSION, inputs).double().softmax(-1)
    labels = (p.cumsum(-1) <= torch.from_numpy(label_uniforms(seed, 50))[:, None]).sum(-1)
    residual = (nn.functional.one_hot(labels, 3) - p).square()
    for words in ({"seed": seed}, {"targets": labels}):
        found = fisher_scores(softmax_regression, REGRESSION, names=["w", "b"], inputs=inputs, **words)
        torch.testing.assert_close(found["w"].double(), residual.mT @ inputs.double().square(), rtol=1e-5, atol=0)
        torch.testing.assert_close(found["b"].double(), residual.sum(0), rtol=1e-5, atol=0)


def test_labels_are_drawn_from_the_model() -> None:
    """Over draws (1[c = y] - p_c)^2 has the mean p_c (1 - p_c); 4000 of them come within four standard errors."""
    params = {"w": torch.zeros(3, 1), "b": torch.tensor([0.0, 1.0, -2.0])}
    p = params["b"].double().softmax(-1)
    sums = fisher_scores(softmax_regression, params, names=["b"], inputs=torch.zeros(4000, 1), seed=1)
    found = sums["b"].double() / 4000
    spread = (p * (1 - p) * (1 - 2 * p).square() / 4000).sqrt()
    assert ((found - p * (1 - p)).abs() <= 4 * spread).all()
    labels = [draw_label(params["b"], u) for u in label_uniforms(1, 4000)]
    assert np.bincount(labels) / 4000 == pytest.approx(p.numpy(), abs=4 * 0.5 / 4000**0.5)


def test_true_labels_and_sampled_ones_differ_and_the_seed_matters() -> None:
    words = {"names": ["w"], "inputs": drawn(2, 30, 4)}
    first, again, other = (fisher_scores(softmax_regression, REGRESSION, seed=s, **words)["w"] for s in (1, 1, 2))
    true = fisher_scores(softmax_regression, REGRESSION, targets=torch.zeros(30), **words)["w"]
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, true)


def test_it_is_not_the_square_of_the_batchs_gradient() -> None:
    inputs, targets = drawn(2, 64, 4), torch.arange(64) % 3
    w = REGRESSION["w"].clone().requires_grad_()
    loss = nn.functional.cross_entropy(softmax_regression({"w": w, "b": REGRESSION["b"]}, inputs), targets)
    (gradient,) = torch.autograd.grad(loss, w)
    words = {"names": ["w"], "targets": targets}
    found = fisher_scores(softmax_regression, REGRESSION, inputs=inputs, **words)["w"] / len(inputs)
    assert (found > 5 * gradient.square()).float().mean() > 0.9


def test_what_does_not_fit_the_model_is_said_in_one_line() -> None:
    words = {"names": ["w"], "inputs": drawn(2, 3, 4)}
    with pytest.raises(ModelError, match="no parameter 'v'"):
        fisher_scores(softmax_regression, REGRESSION, **(words | {"names": ["v"]}))
    with pytest.raises(DataError, match=r"each of 3 examples needs one target, and there are \(2,\)"):
        fisher_scores(softmax_regression, REGRESSION, targets=torch.zeros(2), **words)
