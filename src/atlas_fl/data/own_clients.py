"""Clients that the data themselves name: rows by task and client, and splits by a column, by time or by groups.

Options of a `--task` row say how: `client=` is a column, or `file` for one client a file or folder; `split=` is a
column of splits, `order=` one of numbers or dates, `group=` one whose rows stay together, `least=` the fewest examples
of a client. `task=` is a column of tasks: the row of `--task` is then one task for each word in it. Each client is
cleaned and split by itself, as a site of its own would be, so a simulation and the same federation across machines have
the same rows.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.data.cleaning import SEED, TEST, TRAIN, VALIDATION, arrange, keys
from atlas_fl.data.clients import group_by
from atlas_fl.data.formats import ending_of
from atlas_fl.data.tables import READERS, Table, split_of, time_of
from atlas_fl.data.task import Examples, Images, Labels, Rows, TaskData, as_texts, concatenate
from atlas_fl.errors import ConfigError, DataError, did_you_mean, first_of, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.params import Split
from atlas_fl.rng import generator

OPTIONS = ("client", "split", "order", "group", "least", "task")
BY_FILE = "file"
"""Value of `client=` for one client a file."""
MOST_NAME = 60
"""Characters of a client's name: certificates and file systems have room for some more."""
SHOWN = 5
"""Clients that a note names."""
Part: TypeAlias = tuple[str, str]
"""A client's word, empty where the data name none, and a split, or `all`."""


class Dealing(Frozen):
    """Options by which rows fall to clients and splits."""

    client: str | None = None
    split: str | None = None
    order: str | None = None
    group: str | None = None
    least: int = 0
    task: str | None = None
    """`column`, or `column:word` for one of its tasks alone."""

    @property
    def task_column(self) -> str | None:
        """The column that says of which task a row is."""
        return None if self.task is None else self.task.partition(":")[0]

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """The columns that these options name, and what may be in them (`tables.CHECKS`)."""
        client = None if self.client == BY_FILE else self.client
        columns = (client, self.split, self.order, self.group, self.task_column)
        named = zip(columns, ("text", "split", "time", "text", "class"), strict=True)
        return tuple((name, kind) for name, kind in named if name is not None)


def read_options(name: str, options: Mapping[str, str]) -> Dealing:
    """The options of this task; raises `ConfigError` for a value that is none, and for two that contradict."""
    least = options.get("least", "0")
    if not (least.isdecimal() and len(least) < 10):
        raise ConfigError(f"least={short_repr(least)} of task {name!r} is no number of examples; write least=20, say")
    if "least" in options and "client" not in options:
        raise ConfigError(f"task {name!r} has least= without client=; name the clients' column, or leave least= out")
    if "split" in options and (other := next((one for one in ("order", "group") if one in options), None)):
        raise ConfigError(
            f"task {name!r} has split= and {other}=, which both say what is tested on; leave one of them out"
        )
    if "task" in options and not re.fullmatch("[^:]+(:.+)?", options["task"]):
        raise ConfigError(
            f"task={options['task']} of task {name!r} is no column; write task=kind for the column 'kind', or"
            " task=kind:triage for its task 'triage' alone"
        )
    return Dealing(**{**options, "least": int(least)})  # type: ignore[arg-type]


def find_sources(path: Path, dealing: Dealing, *, name: str) -> dict[str, Path]:
    """The file or folder of every client by its word; the path alone where files are no clients.

    Raises `ConfigError` for a pattern without client=file, `DataError` where nothing is there.
    """
    if dealing.client != BY_FILE:
        if not path.exists() and any(mark in str(path) for mark in "*?["):
            raise ConfigError(
                f"task {name!r} names files by a pattern ({path}); add client={BY_FILE} for one client a file, or name"
                " one file"
            )
        return {"": path}
    if path.is_dir():
        found = [one for one in sorted(path.iterdir()) if not one.name.startswith(".")]
    else:
        found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    found = [one for one in found if one.is_dir() or ending_of(one) in READERS]
    if not found:
        raise DataError(
            f"there are no files of clients in {path}; give a folder or a pattern of files that end in"
            f" {', '.join(READERS)}, or of a folder for each client"
        )
    if twice := [word for word, count in Counter(map(_file_word, found)).items() if count > 1]:
        raise DataError(f"two files in {path} are of one client {twice[0]!r}; keep one, or name them apart")
    return {_file_word(one): one for one in sorted(found, key=lambda one: _natural(_file_word(one)))}


def _file_word(path: Path) -> str:
    return path.name if path.is_dir() else path.name.removesuffix(path.name[-len(ending_of(path)) :])


def split_tasks(
    name: str, tables: Mapping[Part, Table], dealing: Dealing, *, origin: Path
) -> dict[str, dict[Part, Table]]:
    """The tables of every task by its name; of one task where no column tells them apart.

    A `DataError` says that the column has too many tasks, or not the one that is asked for.
    """
    if dealing.task_column is None:
        return {name: {**tables}}
    column, _, only = str(dealing.task).partition(":")
    by_task: dict[str, dict[Part, Table]] = {}
    for part, table in tables.items():
        for word, positions in _positions([plain_word(value) for value in table[column]]).items():
            rows = {one: [values[index] for index in positions] for one, values in table.items()}
            by_task.setdefault(word, {})[part] = rows
    num_rows = sum(len(table[column]) for table in tables.values())
    if len(by_task) > max(1, num_rows // 2):
        raise DataError(
            f"column {column!r} of {origin} has {len(by_task)} different values in {num_rows} rows, such as"
            f" {short_repr(min(by_task))}, and each would be a task; name the column of the tasks with task=, or leave"
            " it out"
        )
    names = names_of_words(by_task, prefix=column)
    chosen = {word: plain for word, plain in names.items() if only in ("", word, plain)}
    if not chosen:
        known = f"{did_you_mean(only, by_task)} it has {first_of(sorted(by_task))}"
        raise DataError(f"column {column!r} of {origin} has no {short_repr(only)}{known}")
    return {f"{name}-{plain}": by_task[word] for word, plain in chosen.items()}


def deal_rows(
    rows: Mapping[Part, Rows], tables: Mapping[Part, Table], dealing: Dealing, *, name: str
) -> dict[str, dict[str, Rows]]:
    """The rows by client and split, of tables by file and split; one client of an empty word where none is named."""
    parts: dict[str, dict[str, list[Rows]]] = {}
    for (word, split), given in rows.items():
        values = {one: tables[word, split][one] for one, _ in dealing.kinds}
        clients = [word] * len(given)
        if dealing.client not in (None, BY_FILE):
            clients = [plain_word(value) for value in values[dealing.client]]
        for client, positions in _positions(clients).items():
            own = {one: [values[one][index] for index in positions] for one in values}
            pieces = _splits(given.take(positions), own, dealing, split=split, name=name)
            for own_split, piece in pieces.items():
                parts.setdefault(client, {}).setdefault(own_split, []).append(piece)
    return {
        client: {split: as_texts(concatenate(pieces), task=name) for split, pieces in parts[client].items()}
        for client in sorted(parts, key=_natural)
    }


def _positions(words: Sequence[str]) -> dict[str, list[int]]:
    return group_by(range(len(words)), lambda index: words[index])


def plain_word(value: Any) -> str:
    """The word in a cell: whole numbers are the same in every kind of file."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _natural(word: str) -> tuple[bool, int, str]:
    """Order of clients: numbers by value, before words."""
    is_number = word.isdecimal() and len(word) < 19
    return not is_number, int(word) if is_number else 0, word


def _splits(
    rows: Rows, values: Mapping[str, Sequence[Any]], dealing: Dealing, *, split: str, name: str
) -> dict[str, Rows]:
    """The rows of one client and file by split, as these options say."""
    if split != "all" or (dealing.split, dealing.order, dealing.group) == (None, None, None):
        return {split: rows}
    if dealing.split is not None:
        words = [split_of(value) or "" for value in values[dealing.split]]
        return {one: rows.take(positions) for one, positions in _positions(words).items()}
    times = None if dealing.order is None else np.asarray([time_of(value) for value in values[dealing.order]])
    groups = range(len(rows)) if dealing.group is None else [plain_word(value) for value in values[dealing.group]]
    return {one: rows.take(positions) for one, positions in cut_groups(groups, times, name=name).items()}


def cut_groups(groups: Sequence[Any], times: Labels | None, *, name: str) -> dict[Split, Labels]:
    """Positions of the rows by split in the usual proportions; rows of one group stay together.

    Groups come in the order of their earliest row in time, or in a random one that the name alone decides; train has
    the first, test the last.
    """
    rows = range(len(groups)) if times is None else np.argsort(times, kind="stable").tolist()
    units = list(group_by(rows, lambda row: groups[row]).values())
    if times is None:
        units = [units[index] for index in generator(SEED, "groups", name).permutation(len(units))]
    total = TRAIN + VALIDATION + TEST
    # the place of a group is that of its middle row, so that a large one goes where most of it belongs
    ends = np.cumsum([len(unit) for unit in units])
    middles = ends - np.asarray([len(unit) for unit in units]) / 2
    bounds = np.asarray([len(groups) * TRAIN / total, len(groups) * (TRAIN + VALIDATION) / total])
    places = np.searchsorted(bounds, middles, side="right")
    order: tuple[Split, Split, Split] = ("train", "validation", "test")
    return {
        split: np.asarray([row for unit, own in zip(units, places) if own == place for row in unit], dtype=np.int64)
        for place, split in enumerate(order)
    }


def large_enough(sizes: Mapping[str, int], dealing: Dealing, *, name: str) -> list[str]:
    """The words of the clients with `least` examples or more; a `DataError` where there is none."""
    words = [word for word, size in sizes.items() if size >= dealing.least]
    if not words:
        raise DataError(
            f"no client of task {name!r} has {dealing.least} examples, the most are {max(sizes.values())}; lower least="
        )
    return words


def arrange_clients(
    dealt: Mapping[str, Mapping[str, Examples]], dealing: Dealing, *, name: str, validation_share: float | None = None
) -> TaskData:
    """The data of a task whose clients are named: each client's splits, and all rows of all clients together.

    Clients with fewer than `least` examples are left out, with a note. A `DataError` names a client without enough.
    """
    sizes = {word: sum(map(len, splits.values())) for word, splits in dealt.items()}
    large_enough(sizes, dealing, name=name)
    few = {word: size for word, size in sizes.items() if size < dealing.least}
    parts: dict[str, TaskData] = {}
    for word, splits in dealt.items():
        if word not in few:
            try:
                parts[word] = arrange(splits, name=name, labelled=False, validation_share=validation_share)
            except DataError as error:
                groups = f" and three groups in {dealing.group!r}" if dealing.group else ""
                raise DataError(
                    f"client {short_repr(word)}: {error}{groups}, or leave small clients out with least=N"
                ) from None
    notes = []
    if few:
        words = ", ".join(f"{word} ({size})" for word, size in list(few.items())[:SHOWN])
        more = ", .." if len(few) > SHOWN else ""
        count = f"{len(few)} of {len(dealt)} clients"
        notes.append(f"left out since they have fewer than {dealing.least} examples: {count}, {words}{more}")
    holders = Counter(key for part in parts.values() for key in set(keys(part.train)))
    if shared := sum(holders[key] > 0 for part in parts.values() for key in keys(part.test)):
        kind = "images" if any(isinstance(part.test, Images) for part in parts.values()) else "texts"
        notes.append(f"{shared:,} test {kind} of a client are training {kind} of another one")
    datas = tuple(parts.values())
    whole = datas[0].with_splits(lambda split: concatenate([data.splits[split] for data in datas]))
    left_out = sum(data.left_out for data in datas)
    return replace(whole, left_out=left_out, clients=datas, words=tuple(parts), notes=tuple(notes))


def names_of_words(words: Iterable[str], *, prefix: str) -> dict[str, str]:
    """The name of every one of these words, in their natural order (`name_clients`)."""
    ordered = sorted(words, key=_natural)
    return dict(zip(ordered, name_clients(ordered, prefix=prefix), strict=True))


def name_clients(words: Sequence[str], *, prefix: str) -> tuple[str, ...]:
    """Names of clients for folders, certificates and flags, of the words that the data have for them.

    >>> name_clients(["Nord", "St. Mary's", "7"], prefix="hospital")
    ('Nord', 'St.-Mary-s', 'hospital-7')
    """
    names: dict[str, str] = {}
    for word in words:
        plain = unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
        plain = re.sub(r"[^A-Za-z0-9_.\-]+", "-", plain).strip("-._")[:MOST_NAME]
        # a number alone would be a number of clients in some flags
        name = f"{prefix}-{plain or len(names)}" if not plain or plain.isdecimal() else plain
        number = 2
        while name.casefold() in names:  # some file systems know no capitals
            name = f"{name.removesuffix(f'-{number - 1}')}-{number}"
            number += 1
        names[name.casefold()] = name
    return tuple(names.values())


def name_notes(words: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """A line on the clients whose names are not the words that the data have for them."""
    other = [f"{word!r} is {name}" for word, name in zip(words, names, strict=True) if word != name]
    more = ", .." if len(other) > SHOWN else ""
    return (f"names of clients: {', '.join(other[:SHOWN])}{more}",) if other else ()
