"""The settings of a federation's data: tasks, clients, their devices, and who comes late."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from atlas_fl.config.kinds import mistake, whole_number


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tasks, clients and their devices."""

    tasks: tuple[str, ...] = ("movie", "trec", "pairs")
    """Tasks of the federation (`atlas list tasks`)."""
    task: tuple[str, ...] = ()
    """Your own csv, jsonl or parquet: `name=path`, then as needed text=, pair= and label= (columns) and metric=, or
    text= and target= for text that is to be written; commas between; may be repeated."""
    clients_per_task: int = 3
    """Clients that share each task."""
    samples: int | None = 200
    """Training examples of a client; `none` deals out all that there are."""
    validation_samples: int | None = 100
    """Validation examples of a client, or `none`; choices are made on these."""
    test_samples: int | None = 130
    """Test examples of a client, or `none`; results are reported on these."""
    partition: Literal["iid", "dirichlet", "quantity"] = "iid"
    """How a task's examples fall to its clients."""
    dirichlet_alpha: float = 0.5
    """Concentration of the Dirichlet partition; smaller is more uneven."""
    max_length: int | None = None
    """Longest sequence in tokens; the task's own limit by default."""
    devices: tuple[str, ...] = ("cpu_2gb", "tablet_4gb", "laptop_8gb", "gpu_16gb")
    """Device profiles (`atlas list devices`), dealt out to the clients in turn."""
    device: tuple[str, ...] = ()
    """A profile of your own: `name=memory_gb=3,gflops=50,...` with every number from memory_gb to max_rank that
    `atlas list devices` shows; may be repeated."""
    rouge_examples: int = 16
    """Most held-out prompts of a split that a client answers after the last round, for ROUGE; 0 for none."""
    new_tokens: int = 32
    """Most tokens of such an answer."""
    data_dir: str | None = None
    """A directory that holds data sets which would else come from the hub or its cache."""
    shuffle_labels: bool = False
    """Control: permute the training labels; accuracy must fall to the majority class."""
    arrive: tuple[str, ...] = ()
    """Clients that come when the run has begun: `movie-1=3` joins before round 3, placed beside the clusters that there
    are by then; may be repeated."""


def arrivals(words: Sequence[str]) -> Mapping[str, int]:
    """The round before which each client joins that `--arrive` names.

    >>> dict(arrivals(("movie-1=3",)))
    {'movie-1': 3}

    Raises:
        ConfigError: a word is no `client=round` with a round from 2, or a client stands there twice.
    """
    found: dict[str, int] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        number = whole_number(text) or 0
        if not name or name in found or number < 2:
            raise mistake("--arrive", word, "client=round with a round from 2, each client once")
        found[name] = number
    return found
