import numpy as np
import pytest
import torch

from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.sparse.task_vectors import MERGES, apply_vector, merge_vectors, task_vector, trim_mask

START = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
TRAINED = {"w": torch.tensor([1.5, 1.0]), "b": torch.tensor([3.0])}


def test_difference_addition_negation_and_scale_by_hand() -> None:
    vector = task_vector(TRAINED, START)
    assert vector["w"].tolist() == [0.5, -1.0]
    assert apply_vector(START, vector)["w"].tolist() == TRAINED["w"].tolist()
    assert apply_vector(START, vector, scale=0.5)["w"].tolist() == [1.25, 1.5]
    assert apply_vector(START, vector, scale=-1.0)["w"].tolist() == [0.5, 3.0], "a negated vector"
    assert apply_vector(START, {"w": vector["w"]})["b"].tolist() == [3.0], "what the vector lacks stays"


def test_ties_by_hand() -> None:
    """Four weights, three vectors, half of each kept.

    Trimmed: (4 0 -3 0), (2 0 5 0), (-1 0 0 1): of the third, -1 and the 1 at the end. Signs of the sums 5, 0, 2, 1:
    + . + +. Means of what agrees: (4 + 2) / 2, nothing, 5, 1.
    """
    vectors = [
        {"w": torch.tensor([4.0, 0.5, -3.0, 1.0])},
        {"w": torch.tensor([2.0, -1.0, 5.0, 0.5])},
        {"w": torch.tensor([-1.0, 0.25, 0.5, 1.0])},
    ]
    assert trim_mask(vectors[2], keep=0.5)["w"].tolist() == [True, False, False, True]
    assert merge_vectors(vectors, method="ties", keep=0.5)["w"].tolist() == [3.0, 0.0, 5.0, 1.0]
    assert merge_vectors(vectors, method="mean")["w"].tolist() == pytest.approx([5 / 3, -0.25 / 3, 2.5 / 3, 2.5 / 3])


def test_masses_that_cancel_leave_nothing() -> None:
    vectors = [{"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([-2.0, 1.0])}]
    assert merge_vectors(vectors, method="ties", keep=1.0)["w"].tolist() == [0.0, 1.0]


def dense_ties(vectors, keep):
    """The paper's algorithm on flat arrays, with a sort for the trimming."""
    flat = [np.concatenate([vector[name].flatten() for name in sorted(vector)]) for vector in vectors]
    trimmed = np.zeros((len(flat), len(flat[0])))
    for row, one in zip(trimmed, flat):
        largest = np.argsort(-np.abs(one), kind="stable")[: round(keep * len(one))]
        row[largest] = one[largest]
    elected = np.sign(trimmed.sum(0))
    merged = np.zeros(trimmed.shape[1])
    for j, sign in enumerate(elected):
        agreeing = [one[j] for one in trimmed if sign and np.sign(one[j]) == sign]
        merged[j] = np.mean(agreeing) if agreeing else 0.0
    return merged


@pytest.mark.parametrize("keep", [0.05, 0.2, 0.5, 1.0])
def test_ties_equals_a_dense_reference(keep: float) -> None:
    draw = torch.Generator().manual_seed(round(100 * keep))
    vectors = [{"b": torch.randn(7, generator=draw), "a": torch.randn(5, 4, generator=draw)} for _ in range(4)]
    found = merge_vectors(vectors, method="ties", keep=keep)
    assert np.concatenate([found["a"].flatten(), found["b"]]) == pytest.approx(dense_ties(vectors, keep), abs=1e-6)


def test_what_does_not_go_together_is_refused() -> None:
    assert set(MERGES) == {"mean", "ties"}
    vector = task_vector(TRAINED, START)
    with pytest.raises(ConfigError, match="unknown merge 'tie'; did you mean 'ties'"):
        merge_vectors([vector], method="tie")
    with pytest.raises(ConfigError, match="keep is 0"):
        merge_vectors([vector], method="ties", keep=0)
    with pytest.raises(ModelError, match="no task vector"):
        merge_vectors([], method="mean")
    with pytest.raises(ModelError, match=r"'b' is absent and \(1,\)"):
        task_vector(TRAINED, {"w": START["w"]})
    with pytest.raises(ModelError, match=r"'w' is \(2,\) and \(3,\)"):
        merge_vectors([vector, vector | {"w": torch.zeros(3)}], method="mean")
    with pytest.raises(ModelError, match=r"'v' is absent and \(1,\)"):
        apply_vector(START, {"v": torch.zeros(1)})
