import numpy as np

from atlas_fl.aggregation.mixing import components_of, groups_of


def test_equal_rows_are_found_once_and_identity_rows_not_at_all():
    matrix = np.array([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.8, 0, 0], [0, 0, 0, 1]])
    (group,) = groups_of(matrix)
    assert group.sources == (0, 1)
    assert group.rows.tolist() == [[0.5, 0.5], [0.2, 0.8]]
    assert group.targets == ((0, 1), (2,))
    assert group.everyone == (0, 1, 2)


def test_rows_with_other_support_are_other_groups():
    matrix = np.array([[0.5, 0.5, 0], [0, 1, 0], [0, 0.5, 0.5]])
    assert [group.sources for group in groups_of(matrix)] == [(0, 1), (1, 2)]
    assert groups_of(np.eye(3)) == ()


def test_a_swap_is_not_the_identity():
    first, second = groups_of(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert (first.sources, first.targets) == ((1,), ((0,),))
    assert (second.sources, second.targets) == ((0,), ((1,),))


def test_components_are_connected_clients():
    matrix = np.array([[1, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert components_of(matrix) == (0, 1, 2, 1)
