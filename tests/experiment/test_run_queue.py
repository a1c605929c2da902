from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from atlas_fl.experiment.sweep import RunQueue


def test_a_thread_is_given_the_runs_of_one_seed_and_then_helps_the_others() -> None:
    runs = [(0, 7), (1, 8), (2, 7), (3, 8), (4, 7), (5, 7)]
    queue = RunQueue(runs)
    assert [queue.take() for _ in range(3)] == [0, 2, 4], "of seed 7"
    with ThreadPoolExecutor(1) as other:
        assert [other.submit(queue.take).result() for _ in range(3)] == [1, 3, 5], "of seed 8, then the last of 7"
    assert queue.take() is None


def test_no_run_is_given_twice_or_lost() -> None:
    queue, barrier = RunQueue([(index, index % 3) for index in range(50)]), Barrier(4)

    def work() -> list[int]:
        barrier.wait()
        taken = []
        while (index := queue.take()) is not None:
            taken.append(index)
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [index for future in [pool.submit(work) for _ in range(4)] for index in future.result()]
    assert sorted(taken) == list(range(50))
