from atlas_fl.experiment.sweep import RunQueue


def test_a_process_is_given_the_runs_of_one_seed_and_then_helps_the_others() -> None:
    queue = RunQueue({0: 7, 1: 8, 2: 7, 3: 8, 4: 7, 5: 8, 6: 8})
    assert queue.take(None) == 0
    assert queue.take(None) == 1, "of a seed that nobody has begun"
    assert [queue.take(7) for _ in range(2)] == [2, 4]
    assert [queue.take(8), queue.take(7)] == [3, 5], "the last of 8 are shared"
    assert [queue.take(7), queue.take(8)] == [6, None]
