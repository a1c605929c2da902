"""LoRA averaging in product space, as FlexLoRA: `sum_l m_kl s_l B_l A_l`, then a truncated SVD to each client's rank.

The dense matrix is never formed while the ranks together stay below its sides: with A^T = Q R (QR of the stack),
the update is `(B W R^T) Q^T`, and the small Gram matrix `H = R W B^T B W R^T` holds its squared singular values.
All in float64, so that squaring costs nothing that float32 factors could hold. Eckart and Young, 1936;
FlexLoRA: Bai et al. 2024, arXiv:2402.11505.

Products as factors again (`Factors`), without a truncation: their sum, and what averaged factors lack of it.

    sum_k w_k s_k B_k A_k              = [w_k s_k B_k ...] [A_k ...]                     rank n r
    sum_k w_k s B_k A_k - s Bbar Abar  = [w_k s (B_k - B_n) ...] [A_k - Abar ...]        rank (n - 1) r, k < n

with Bbar = sum_k w_k B_k and Abar = sum_k w_k A_k. The second form follows from sum_k w_k (A_k - Abar) = 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from atlas_fl.frozen import Frozen
from atlas_fl.params import LORA_A, LORA_B, Params
from atlas_fl.rng import torch_generator

RELATIVE_RANK = 1e-6
"""Singular values below this share of the largest are zero: float32 factors hold no more."""
INPUT_NOISE = 1e-7
"""So are those below this share of the largest summand: what cancels leaves rounding behind."""


class Leading(Frozen, eq=False):
    """The leading singular directions of one update, split evenly: `left @ right` is the best approximation."""

    left: Tensor
    """(d_out, directions): U sqrt(S)."""
    right: Tensor
    """(directions, d_in): sqrt(S) V^T, signs fixed."""
    energies: Tensor
    """(directions,): squared singular values, falling."""
    total: float
    """The squared Frobenius norm of the whole update."""


def _spectrum(gram: Tensor, *, rank: int, noise: float) -> tuple[Tensor, Tensor]:
    """The leading singular values, falling, with their vectors as columns; what is numerically zero is left out."""
    squares, vectors = torch.linalg.eigh(gram)
    sigma = squares[-rank:].flip(0).clamp_min(0).sqrt()
    alive = int((sigma > max(RELATIVE_RANK * float(sigma[0]), noise)).sum())
    return sigma[:alive], vectors[:, -rank:].flip(1)[:, :alive]


def row_signs(rows: Tensor) -> Tensor:
    """+1 or -1 for each row, so that its largest entry becomes positive: eigenvectors come with any sign."""
    return rows.gather(1, rows.abs().argmax(1, keepdim=True))[:, 0].sign() if len(rows) else rows.new_zeros(0)


def truncated_svd(a: Tensor, b: Tensor, weights: Tensor, *, ranks: Sequence[int]) -> list[Leading]:
    """For each row of `weights` (rows, R) the best factors of `b @ diag(row) @ a` with that row's rank, in float64.

    `a` is (R, d_in) and `b` (d_out, R), float64. Directions that are numerically zero are left out.
    """
    noise = ((weights.abs() * b.norm(dim=0) * a.norm(dim=1)).amax(1) * INPUT_NOISE).tolist()
    rows = zip(weights, ranks, noise)
    if a.shape[0] >= min(a.shape[1], b.shape[0]):
        return [leading_dense((b * row) @ a, rank=rank, noise=limit) for row, rank, limit in rows]
    basis, upper = torch.linalg.qr(a.T)  # (d_in, R), (R, R)
    inner = b.T @ b
    components = []
    for row, rank, limit in rows:
        core = row[:, None] * upper.T  # b @ core @ basis.T is the update
        gram = core.T @ (inner @ core)
        sigma, vectors = _spectrum(gram, rank=rank, noise=limit)
        right = vectors.T @ basis.T
        signs, root = row_signs(right), sigma.sqrt()
        # fresh memory of this size costs as much as the product itself, so scale the small factor, or in place
        left = b @ (core @ (vectors * (signs / root)))
        right *= (signs * root)[:, None]
        components.append(Leading(left=left, right=right, energies=sigma.square(), total=float(gram.trace())))
    return components


def leading_dense(update: Tensor, *, rank: int, noise: float = 0.0) -> Leading:
    """The best factors of this rank of a dense update (d_out, d_in), float64; what is below `noise` is zero."""
    wide = update.shape[1] > update.shape[0]
    gram = update @ update.T if wide else update.T @ update
    sigma, vectors = _spectrum(gram, rank=rank, noise=noise)
    right = vectors.T @ update if wide else vectors.T
    signs, root = row_signs(right), sigma.sqrt()
    if wide:
        left, right = vectors * (signs * root), right * (signs / root)[:, None]
    else:
        left, right = update @ (vectors * (signs / root)), right * (signs * root)[:, None]
    return Leading(left=left, right=right, energies=sigma.square(), total=float(gram.trace()))


def null_directions(client_a: Tensor, taken: Tensor, count: int) -> Tensor:
    """(count, d_in) orthogonal rows, orthogonal to the rows of `taken`, as long as those of `client_a` are on average.

    They lie in the span of the client's own A while that has room, then anywhere. Beside a zero column of B they
    leave the function as it is and keep its gradient alive, which a zero row of A would not.
    """
    dim = client_a.shape[1]
    length = float(client_a.square().sum(1).mean().sqrt()) or 1.0
    extra = torch.randn(count, dim, generator=torch_generator(0, "spare", dim), dtype=torch.float64).to(client_a.device)
    rows = taken / taken.norm(dim=1, keepdim=True)
    rows_found: list[Tensor] = []
    for candidates in (client_a, extra):
        rest = candidates - (candidates @ rows.T) @ rows
        squares, vectors = torch.linalg.eigh(rest @ rest.T)
        size = float(candidates.square().sum())
        fresh = int((squares > 1e-8 * size).sum()) if size else 0
        fresh = min(fresh, count - sum(map(len, rows_found)), dim - len(rows))
        if fresh > 0:
            picked = torch.linalg.qr(rest.T @ vectors.flip(1)[:, :fresh])[0].T
            rows_found.append(picked)
            rows = torch.cat([rows, picked])
    # a rank above d_in leaves no orthogonal direction: any will do
    missing = count - sum(map(len, rows_found))
    rows_found.append(extra[:missing] / extra[:missing].norm(dim=1, keepdim=True))
    return torch.cat(rows_found) * length


def factorise(best: Leading, client_a: Tensor, *, rank: int, scale: float) -> tuple[Tensor, Tensor, float]:
    """(A (rank, d_in), B (d_out, rank), energy thrown away) in float64: `scale * B @ A` is the best of that rank."""
    num_kept = min(rank, len(best.energies))
    a, b = best.right[:num_kept], best.left[:, :num_kept] / scale
    if num_kept < rank:
        a = torch.cat([a, null_directions(client_a.double(), a, rank - num_kept)])
        b = torch.nn.functional.pad(b, (0, rank - num_kept))
    return a, b, max(best.total - float(best.energies[:num_kept].sum()), 0.0)


def fit_clients(
    best: Leading,
    targets: Sequence[int],
    a: Mapping[int, Tensor],
    b: Mapping[int, Tensor],
    *,
    scale: Callable[[int], float],
) -> Iterator[tuple[int, Tensor, Tensor, float, float]]:
    """(client, A, B, energy thrown away, energy of the whole) of every target, at the rank and dtype of its old A."""
    done: dict[int, tuple[Tensor, Tensor, float]] = {}
    for k in targets:
        rank = a[k].shape[0]
        # equal rank, equal result, unless spare directions come from the client's own A
        if rank not in done or rank > len(best.energies):
            new_a, new_b, thrown = factorise(best, a[k], rank=rank, scale=scale(rank))
            done[rank] = (new_a.to(a[k].dtype).contiguous(), new_b.to(b[k].dtype).contiguous(), thrown)
        yield k, *done[rank], best.total


def stack_factors(a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float | Tensor]) -> tuple[Tensor, Tensor]:
    """(R, d_in) and (d_out, R) in float64: the stacks of A and of s B; s may be one number for each column."""
    scaled = [tensor.double() * scale for tensor, scale in zip(b, scales)]
    return torch.cat([tensor.double() for tensor in a]), torch.cat(scaled, 1)


def sum_as_pair(
    a: Sequence[Tensor], b: Sequence[Tensor], weights: Sequence[float], *, old_scale: float, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """A and B of this rank and scale of the weighted sum of updates of one old rank.

    Exact while its rank fits, else the best approximation; types and spare directions are those of the first.
    """
    row = torch.tensor(weights, dtype=torch.float64, device=a[0].device).repeat_interleave(len(a[0]))[None]
    best = truncated_svd(*stack_factors(a, b, [old_scale] * len(a)), row, ranks=[rank])[0]
    new_a, new_b, _ = factorise(best, a[0], rank=rank, scale=scale)
    return new_a.to(a[0].dtype).contiguous(), new_b.to(b[0].dtype).contiguous()


def energy_share(thrown: Mapping[str, float], total: Mapping[str, float]) -> dict[str, float]:
    """Share of the squared norm that each client's rank could not hold, over all modules."""
    return {client: thrown[client] / total[client] if total[client] > 0 else 0.0 for client in thrown}


class Factors(Frozen, eq=False):
    """An update `b @ a` of one module, its scale in b, float64."""

    a: Tensor
    """(rank, d_in); rank 0 where nothing is to be added."""
    b: Tensor
    """(d_out, rank)."""


def stack_products(
    a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float], weights: Sequence[float]
) -> Factors:
    """FLoRA's server step of one module: the weighted sum of all s B A; a_k is (r_k, d_in) and b_k (d_out, r_k)."""
    wide, tall = stack_factors(a, b, [weight * scale for weight, scale in zip(weights, scales, strict=True)])
    return shorten(Factors(a=wide, b=tall))


def residual(a: Sequence[Tensor], b: Sequence[Tensor], scale: float, weights: Sequence[float]) -> Factors:
    """Addition of FedEx-LoRA to a module's averaged adapter: a_k is (r, d_in), b_k (d_out, r), weights sum to 1."""
    wide = [factor.double() for factor in a]
    mean = sum((weight * factor for weight, factor in zip(weights, wide, strict=True)), torch.zeros_like(wide[0]))
    last = b[-1].double()
    others = [scale * weight * (factor.double() - last) for weight, factor in zip(weights[:-1], b[:-1])]
    rows = [wide[0][:0], *(factor - mean for factor in wide[:-1])]
    return shorten(Factors(a=torch.cat(rows), b=torch.cat([last[:, :0], *others], dim=1)))


def add_factors(frozen: Factors, new: Factors) -> Factors:
    """Frozen part after another round: the sum of both updates."""
    return shorten(Factors(a=torch.cat([frozen.a, new.a]), b=torch.cat([frozen.b, new.b], dim=1)))


def shorten(factors: Factors) -> Factors:
    """The same update with a rank of at most min(d_in, d_out): above it one factor is the identity."""
    (rank, d_in), d_out = factors.a.shape, len(factors.b)
    if rank <= min(d_in, d_out):
        return factors
    dense, identity = factors.b @ factors.a, torch.eye(min(d_in, d_out), dtype=torch.float64, device=factors.a.device)
    return Factors(a=dense, b=identity) if d_out <= d_in else Factors(a=identity, b=dense)


def to_adapter(module: str, factors: Factors, scale: Callable[[int], float]) -> dict[str, Tensor]:
    """float32 A and B with `scale(rank) B A` as the update; nothing of rank 0."""
    if not len(factors.a):
        return {}
    b = factors.b / scale(len(factors.a))
    return {module + LORA_A: factors.a.float(), module + LORA_B: b.float().contiguous()}


def from_adapter(module: str, adapter: Params, scale: Callable[[int], float], *, like: Factors) -> Factors:
    """The update of one module of this adapter; of rank 0, of the shape of `like`, where it has none."""
    if module + LORA_A not in adapter:
        return Factors(a=like.a[:0], b=like.b[:, :0])
    a, b = (adapter[module + end].to(like.a) for end in (LORA_A, LORA_B))
    return Factors(a=a, b=scale(len(a)) * b)
