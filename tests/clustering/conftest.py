"""Clients with a known truth: unit sketches of two halves that share a task direction and differ by noise."""

import numpy as np
import pytest


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def make_planted(sizes, *, signal=0.5, dim=256, seed=0):
    """First halves, second halves (n, dim) and task names; `signal` is the expected c_kk."""
    rng = np.random.default_rng(seed)
    tasks = [name for task, size in enumerate(sizes) for name in [f"task{task}"] * size]
    directions = {task: unit(rng.normal(size=dim)) for task in dict.fromkeys(tasks)}
    clean = np.stack([directions[task] for task in tasks])
    halves = [np.sqrt(signal) * clean + np.sqrt(1 - signal) * unit(rng.normal(size=clean.shape)) for _ in range(2)]
    return unit(halves[0]), unit(halves[1]), tasks


@pytest.fixture
def planted():
    return make_planted
