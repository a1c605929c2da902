import numpy as np
import pytest

from atlas_fl.data.cleaning import arrange, bin_edges, check_no_leak, strata, stratified_order
from atlas_fl.data.task import Rows, TaskData
from atlas_fl.errors import DataError
from atlas_fl.rng import generator


def made(count: int, *, share: float = 0.3, prefix: str = "text") -> Rows:
    label = (np.arange(count) < share * count).astype(np.int64)
    return Rows(text=tuple(f"{prefix} {i}" for i in range(count)), label=label)


def texts(data: TaskData) -> list[tuple[str, ...]]:
    return [data.train.text, data.validation.text, data.test.text]


def test_430_rows_are_one_default_client() -> None:
    data = arrange({"all": made(430)}, name="x")
    assert [len(part) for part in texts(data)] == [200, 100, 130]
    assert [int(rows.label.sum()) for rows in (data.train, data.validation, data.test)] == [60, 30, 39]


def test_splits_depend_on_rows_and_name_alone() -> None:
    assert texts(arrange({"all": made(90)}, name="x")) == texts(arrange({"all": made(90)}, name="x"))
    assert texts(arrange({"all": made(90)}, name="x")) != texts(arrange({"all": made(90)}, name="y"))


def test_duplicates_never_reach_two_splits() -> None:
    once = made(60)
    thrice = Rows(text=once.text * 3, label=np.tile(once.label, 3))
    data = arrange({"all": thrice}, name="x")
    check_no_leak(data.splits)
    assert sorted(sum(texts(data), ())) == sorted(once.text)


def test_every_stretch_of_a_stratified_order_has_the_classes_shares() -> None:
    labels = (np.arange(1000) < 100).astype(np.int64)
    order = stratified_order(labels, generator(0, "t"))
    assert sorted(order.tolist()) == list(range(1000))
    assert all(8 <= part.sum() <= 12 for part in np.split(labels[order], 10))


def test_values_fall_into_equally_filled_bins() -> None:
    values = np.arange(10, dtype=np.float32) ** 2
    assert strata(values).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert strata(np.asarray([-5.0, 1e9], dtype=np.float32), edges=bin_edges(values)).tolist() == [0, 4]


def test_arrange_keeps_three_labelled_splits_and_cleans_them() -> None:
    shared = made(50).take(range(5, 25))
    given = {"train": made(50, share=0.7), "validation": made(10, prefix="v"), "test": shared}
    data = arrange(given, name="x")
    assert data.test.text == given["test"].text
    assert data.validation.text == given["validation"].text
    assert data.train.text == given["train"].text[:5] + given["train"].text[25:]


def test_rows_that_are_left_out_are_counted() -> None:
    twice = Rows(text=("again", "again", "said", "said"), label=np.array([1, 1, 0, 1]))  # one repeats, two contradict
    own = made(50)
    train = Rows(text=own.text + twice.text, label=np.concatenate([own.label, twice.label]))
    data = arrange({"train": train, "validation": made(9, prefix="v"), "test": own.take(range(7))}, name="x")
    assert data.left_out == 1 + 2 + 7 and len(data.train) == 50 - 7 + 1
    assert arrange({"all": train}, name="x").left_out == 3
    assert arrange({"all": own}, name="x").left_out == 0


def test_without_labelled_test_the_published_validation_is_the_test() -> None:
    given = {"train": made(100), "validation": made(30, prefix="v")}
    data = arrange(given, name="x")
    assert data.test.text == given["validation"].text
    assert (len(data.validation), len(data.train)) == (20, 80)
    assert set(data.validation.text) | set(data.train.text) == set(given["train"].text)


def test_train_alone_gives_both_held_out_splits() -> None:
    data = arrange({"train": made(100)}, name="x")
    assert [len(part) for part in texts(data)] == [64, 16, 20]
    check_no_leak(data.splits)


def test_no_more_than_two_thousand_rows_are_carved() -> None:
    assert len(arrange({"train": made(20_000), "validation": made(30, prefix="v")}, name="x").validation) == 2000


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(DataError, match=r"task 'x' has no validation rows \(4 distinct rows in all\); give it more"):
        arrange({"all": made(4, share=0.5)}, name="x")


def test_rows_that_cleaning_took_are_counted_where_they_leave_nothing() -> None:
    same = Rows(text=("Same", "same") * 3, label=np.asarray([0, 1] * 3))
    told = r"no test rows \(0 distinct rows in all\); rows left out: 6, which repeat or contradict others"
    with pytest.raises(DataError, match=told):
        arrange({"all": same}, name="x")
    told = "and no training row; rows left out: 1, which .*, or lie in two splits; give it train rows, three at"
    train = Rows(text=(*made(50).text, "v"), label=np.append(made(50).label, 2))
    test = Rows(text=("u", "v", "w"), label=np.asarray([0, 2, 0]))
    with pytest.raises(DataError, match=told):
        arrange({"train": train, "test": test}, name="x", label_names="abc")


def test_a_class_that_is_held_out_alone_is_named_with_its_split() -> None:
    test = Rows(text=("u", "v", "w"), label=np.asarray([0, 2, 2]))
    told = "class 'c' of task 'x' has 2 test rows and no training row; give it train rows, three at the least"
    with pytest.raises(DataError, match=told):
        arrange({"train": made(50), "test": test}, name="x", label_names="abc")
    assert len(arrange({"train": made(50), "test": test}, name="x").test) == 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_three_rows_of_a_class_suffice_to_learn_it_whatever_the_draw(count: int) -> None:
    refused = set()
    for task in map(str, range(12)):
        label = np.append(made(60).label, [2] * count)
        rows = Rows(text=(*made(60).text, *map(str, range(count))), label=label)
        try:
            data = arrange({"all": rows}, name=task, label_names="abc")
        except DataError as error:
            refused.add(str(error).partition("; ")[2])
        else:
            assert 2 in data.train.label
    assert refused <= {"give it train rows, three at the least, or remove it everywhere"}
    assert bool(refused) == (count < 3)


def test_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="all 200 training rows of task 'x' have one label; give it rows of a second"):
        arrange({"all": made(430, share=0)}, name="x")
