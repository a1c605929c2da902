"""Models whose matrices are used in every way that there is, against one backward pass an example."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from atlas_fl.errors import ModelError
from atlas_fl.sparse import fisher as squares
from atlas_fl.sparse.fisher import capture, fisher_scores, logits_of_module, math_attention


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


def by_loop(module, inputs, targets):
    """The reference: a backward pass for every example."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    for value, target in zip(inputs, targets, strict=True):
        module.zero_grad()
        functional.log_softmax(module(value[None])[0], -1)[target].backward()
        for name, parameter in module.named_parameters():
            sums[name] += parameter.grad.square()
    return sums


def of(module, inputs, targets, **words):
    params = dict(module.named_parameters())
    words = {"names": params, "labels": "true", "targets": targets} | words
    return fisher_scores(logits_of_module(module), params, inputs=inputs, **words).sums


def assert_near(found, expected):
    for name, tensor in found.items():
        size = float(expected[name].abs().max())
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6 * size + 1e-12)


@pytest.mark.parametrize("kind", [Block, Tied, Grouped])
def test_every_model_equals_the_loop(kind) -> None:
    module, inputs, targets = made(kind)
    assert_near(of(module, inputs, targets), by_loop(module, inputs, targets))


@pytest.mark.parametrize("tile", [1, 20, 24, 10_000])
def test_tiles_of_a_matrix_that_divide_its_rows_or_do_not_add_up_to_it(monkeypatch, tile: int) -> None:
    monkeypatch.setattr(squares, "TILE", tile)  # matrices of 8 rows: one, two, or three of them in a tile, or all
    module, inputs, targets = made(Block)
    assert_near(of(module, inputs, targets), by_loop(module, inputs, targets))


@pytest.mark.parametrize(
    "idle",
    [
        [],
        [(0, 1)],
        [(0, 1), (1, 1), (2, 1)],
        [(n, t) for n in range(3) for t in (0, 2, 3)],
        [(n, t) for n in range(3) for t in range(4)],
    ],
)
def test_tokens_without_a_gradient_are_left_out_only_where_no_example_has_one(idle) -> None:
    source = torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 4, 5, generator=source), torch.randn(3, 4, 6, generator=source)
    for example, token in idle:
        left[example, token] = 0
    total = torch.ones(5, 6, dtype=torch.float64)
    squares._add_products(total, left, right)
    torch.testing.assert_close(total.float(), 1 + torch.einsum("nto,nti->noi", left, right).square().sum(0))


@pytest.mark.parametrize(
    ("kind", "matrices"),
    [
        (Block, ["head.weight", "key.weight", "patches.weight", "query.weight", "twice.weight", "value.weight"]),
        (Tied, ["inner.weight"]),
        (Grouped, ["dilated.weight"]),
    ],
)
def test_only_matrices_that_are_in_nothing_but_products_take_the_short_way(kind, matrices) -> None:
    module, inputs, targets = made(kind)
    layout = layout_of(module, inputs, targets)
    assert layout.matrices == matrices
    if kind is Block:
        assert [use for name, use in layout.products if name == "twice.weight"] == [0, 1]


def layout_of(module, inputs, targets):
    logits = logits_of_module(module)
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def log_prob(params, value, target):
        return logits(params, value[None])[0].log_softmax(-1).gather(0, target[None])[0]

    return capture(log_prob, params, list(params), inputs=inputs, draws=targets)


def test_the_size_of_the_chunks_changes_rounding_alone() -> None:
    module, inputs, targets = made(Block)
    one = layout_of(module, inputs, targets).bytes_per_example
    whole = of(module, inputs, targets)
    for examples in (1, 4):
        assert_near(of(module, inputs, targets, memory_bytes=examples * one), whole)


def test_chosen_parameters_alone_are_scored_and_as_they_are_among_all() -> None:
    module, inputs, targets = made(Block)
    whole, some = of(module, inputs, targets), of(module, inputs, targets, names=["query.weight", "norm.bias"])
    assert sorted(some) == ["norm.bias", "query.weight"]
    assert_near(some, whole)


def test_no_gradient_of_an_example_is_held_for_matrices() -> None:
    """What the chunks are cut by: with the short way a wide layer costs its inputs and outputs, not its weights."""
    wide = nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 3))
    layout = layout_of(wide, torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
    assert layout.matrices == ["0.weight", "2.weight"]
    assert layout.bytes_per_example < 4 * 4096 * (4 + 3 + 1) * 2


def test_a_model_that_goes_other_ways_for_other_examples_is_refused() -> None:
    count = []

    def logits(params, inputs):
        count.append(1)
        return functional.linear(inputs if len(count) < 2 else functional.linear(inputs, params["w"]), params["w"])

    words = {"labels": "true", "targets": torch.tensor([0, 1])}
    with pytest.raises(ModelError, match="does not compute every example the same way"):
        fisher_scores(logits, {"w": torch.eye(2)}, names=["w"], inputs=torch.ones(2, 2), **words)


def test_threads_at_once_leave_attention_as_it_was() -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    first_in, second_in, first_may_go, first_gone = (threading.Event() for _ in range(4))

    def first() -> None:
        with math_attention():
            first_in.set()
            first_may_go.wait(10)

    def second() -> None:
        first_in.wait(10)
        with math_attention():
            second_in.set()
            first_gone.wait(10)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    second_in.wait(0.2)  # in vain, where one thread has it at a time
    first_may_go.set()
    threads[0].join()
    first_gone.set()
    threads[1].join()
    assert torch.backends.cuda.flash_sdp_enabled() is before
