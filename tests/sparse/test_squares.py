"""Models whose matrices are used in many ways, against gradients by `torch.func.vmap`."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from atlas_fl.sparse.fisher import fisher_scores


class Block(nn.Module):
    """A small vision transformer: patches, a class token, positions, attention, norms, one matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 10, 8))
        self.norm, self.query, self.key, self.value = nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(3))
        self.twice = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, pixels):
        rows = self.patches(pixels).flatten(2).mT
        rows = torch.cat([self.token.expand(len(rows), -1, -1), rows], dim=1) + self.places
        seen = self.norm(rows)
        split = [part(seen).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        rows = rows + functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        rows = functional.gelu(self.twice(functional.gelu(self.twice(rows))))
        return self.head(rows[:, 0])


class Tied(nn.Module):
    """A matrix that is looked up and multiplied with, and one that is transposed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.plain, self.inner = nn.Embedding(7, 4), nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, ids):
        rows = self.inner(self.words(ids)) @ self.plain.t()
        return functional.linear(rows.mean(1), self.words.weight)


class Grouped(nn.Module):
    """Convolutions: in groups, dilated, and with padding by word, of which only the dilated one is a plain product."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(2, 4, 3, groups=2)
        self.dilated = nn.Conv2d(4, 3, 2, dilation=2)
        self.same = nn.Conv2d(3, 3, 3, padding="same")

    def forward(self, pixels):
        return self.same(self.dilated(self.grouped(pixels)).relu()).mean((2, 3))


def made(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = torch.randint(0, 7, (9, 5)) if kind is Tied else torch.randn(9, 2, 6, 6)
        return kind().eval(), inputs, torch.randint(0, 3, (9,))


def by_vmap(module, inputs, targets):
    """The reference: gradients of all examples in one pass of `torch.func`."""
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def log_prob(params, value, target):
        return functional_call(module, params, (value[None],))[0].log_softmax(-1).gather(0, target[None])[0]

    with sdpa_kernel(SDPBackend.MATH):
        gradients = vmap(grad(log_prob), in_dims=(None, 0, 0))(params, inputs, targets)
    return {name: gradient.square().sum(0) for name, gradient in gradients.items()}


def of(module, inputs, targets, **words):
    params = dict(module.named_parameters())
    words = {"names": params, "targets": targets} | words
    return fisher_scores(lambda own, rows: functional_call(module, dict(own), (rows,)), params, inputs=inputs, **words)


def assert_near(found, expected):
    for name, tensor in found.items():
        size = float(expected[name].abs().max())
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6 * size + 1e-12)


@pytest.mark.parametrize("kind", [Block, Tied, Grouped])
def test_every_model_has_the_squares_of_vmap(kind) -> None:
    module, inputs, targets = made(kind)
    assert_near(of(module, inputs, targets), by_vmap(module, inputs, targets))


def test_chosen_parameters_alone_are_scored_and_as_they_are_among_all() -> None:
    module, inputs, targets = made(Block)
    whole, some = of(module, inputs, targets), of(module, inputs, targets, names=["query.weight", "norm.bias"])
    assert sorted(some) == ["norm.bias", "query.weight"]
    assert_near(some, whole)
