"""A user's own data as a task (`--task`): a table (`data.tables`), a folder of them, or a folder of images by class."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from atlas_fl.data import chat, cleaning, formats, hub, own_clients
from atlas_fl.data.own_clients import Dealing, Part
from atlas_fl.data.tables import READERS, SPLITS, Table, find_split, left_out_note, read_folder, read_rows
from atlas_fl.data.task import (
    METRICS,
    MULTILABEL_METRICS,
    Images,
    Labels,
    Metric,
    Pixels,
    Rows,
    Source,
    Task,
    TaskData,
    read_once,
    rows_to_write,
)
from atlas_fl.errors import ConfigError, DataError, check_known, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.params import TRUNCATIONS, Truncation
from atlas_fl.storage.folder_access import check_regular

HUB = "hub:"
"""Begin of a path that is a data set of the hub: `hub:owner/name`, `hub:owner/name@config#split`."""
FORM = (
    "name=path[,text=COLUMN][,pair=COLUMN][,label=COLUMN][,metric=NAME][,target=COLUMN][,client=COLUMN][,OPTION=VALUE]"
)
CLASSES_FORM = "name,labels=CLASS|CLASS|.."
IMAGE_FORM = "name=path[,size=PIXELS][,client=file][,least=NUMBER][,labels=CLASS|CLASS|..]"
_IMAGE_OPTIONS = ("size", "client", "least", "labels")
SHOWN_CLASSES = 10
_WHOLE_NUMBER = r"-?\d{1,4000}"
"""Longer ones are words: Python reads none of more than 4,300 digits."""
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_WIDE = ("I", "F")
"""Pillow's modes of more than eight bits, which would be cut off at 255."""


def parse_tasks(description: str) -> tuple[Task, ...]:
    """The task of `name=path,text=..,pair=..,label=..,metric=..`, or of `name=path,text=..,target=..`, read from disk.

    With task= there is one for each word in that column, called `name-word`, with its own rows and classes.

    Labels are words or whole numbers, numbered in sorted order, or those of labels= in theirs; with metric=pearson they
    are values. With target= there
    are none: the model writes that column after the text, or the text itself where target= names its column. One file
    is cut into splits (`cleaning.split_rows`); a folder with train, validation and test files keeps its own
    (`cleaning.arrange`); client=, split=, order= and group= say otherwise (`data.own_clients`). A folder of images by
    class is read by `folder_task`. A name with labels= alone has classes and no data, which lie at sites.
    The file or folder is read once for as long as it does not change (`task.read_once`).
    A `ConfigError` says what is wrong with the description, a `DataError` what is wrong with the data.
    """
    name, place, options = split_description(description)
    if not place:
        return (_classes_task(name, options),)
    path = hub.hub_folder(place.removeprefix(HUB)) if place.startswith(HUB) else Path(place).expanduser()
    sources = own_clients.find_sources(path, Dealing(client=options.get("client")), name=name)
    if any(map(_class_folders, sources.values())):
        return (folder_task(name, path, options, sources),)
    columns = _columns(name, options)
    read = read_once(_read_tasks, name, tuple(sources.items()), columns, *READERS.values(), files=sources.values())
    prefix = "client" if columns.dealing.client == own_clients.BY_FILE else str(columns.dealing.client)
    sites = own_clients.names_of_words({word for data, _ in read.values() for word in data.words}, prefix=prefix)
    return tuple(
        _make_task(task, data, names, columns, path=path, clients=tuple(sites[word] for word in data.words))
        for task, (data, names) in read.items()
    )


def _classes_task(name: str, options: Mapping[str, str]) -> Task:
    """A task of which the classes are known here and the data lie at sites (`atlas serve`)."""
    columns = _columns(name, options)
    if not columns.labels or options.keys() - {"labels", "metric", "multi"}:
        raise ConfigError(f"task {name!r} names no file; write {FORM}, or {CLASSES_FORM} where sites have the data")

    def load(_: Source) -> TaskData:
        raise ConfigError(
            f"task {name!r} names classes and no file, which is for `atlas serve`; give it a file: {FORM}"
        )

    return Task(
        name=name,
        num_labels=len(columns.labels),
        multilabel=columns.multi is not None,
        metric=columns.metric,
        label_names=columns.labels,
        positive=_positive(columns.labels, columns, "labels="),
        note="your own: at the sites",
        load=load,
    )


def split_description(description: str) -> tuple[str, str, dict[str, str]]:
    """Name, path and options of a description, whose path is empty where it names classes alone.

    >>> split_description("triage=notes,old.csv,label=urgency")
    ('triage', 'notes,old.csv', {'label': 'urgency'})

    Raises:
        ConfigError: it is of another form.
    """
    # A comma that no `word=` follows belongs to the path.
    first, *rest = re.split(r",(?=\w+=)", description)
    name, equals, path = first.partition("=")
    options = dict(option.split("=", 1) for option in rest)
    if bool(equals) != bool(path) or not (equals or options) or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
        raise ConfigError(
            f"task {description!r} is not of the form {FORM}, or {IMAGE_FORM} for images;"
            " a name is letters, digits, '_', '.', '-'"
        )
    if len(options) < len(rest) or not all(options.values()):
        raise ConfigError(f"task {description!r} gives an option twice or without a value; the form is {FORM}")
    return name, path, options


def with_labels(description: str, classes: Sequence[str]) -> str:
    """The description with these classes in labels=, unless it has its own, has no classes, or names no file.

    >>> with_labels("triage=notes.csv,label=urgency", ["low", "a|b"])
    'triage=notes.csv,label=urgency,labels=low|a%7Cb'
    """
    _, path, options = split_description(description) if "=" in description else ("", "", {})
    has_own = {"labels", "target"} & options.keys() or options.get("metric") == "pearson"
    if not (path and classes) or has_own:
        return description
    # what would end a name in a description is written as in URLs
    return f"{description},labels=" + "|".join(quote(name, safe=" :;()[]{}/'!?*+&<>=") for name in classes)


def described_task(description: str) -> str:
    """The name of the task that this describes, or its own where there may be several (task=).

    >>> described_task("notes=notes.csv,task=kind:triage"), described_task("notes=notes.csv,task=kind")
    ('notes-triage', 'notes')
    """
    name, _, options = split_description(description) if "=" in description else (description, "", {})
    column, colon, word = options.get("task", "").partition(":")
    return f"{name}-{own_clients.name_clients([word], prefix=column)[0]}" if colon else name


def with_task_of(description: str, client: str, *, tasks: Sequence[str]) -> str:
    """The description of the one of its tasks behind which this client is called, where that is one of `tasks`.

    >>> with_task_of("notes=notes.csv,task=kind", "notes-triage-Nord", tasks=["notes-topic", "notes-triage"])
    'notes=notes.csv,task=kind:triage'
    """
    name, _, options = split_description(description) if "=" in description else ("", "", {})
    column = options.get("task", ":")
    own = [task for task in tasks if task.startswith(f"{name}-") and client.startswith(f"{task}-")]
    if ":" in column or not own:
        return description
    word = max(own, key=len).removeprefix(f"{name}-")
    return description.replace(f",task={column}", f",task={column}:{word}")


def _declared_classes(name: str, text: str) -> tuple[str, ...]:
    words = [unquote(word) for word in text.split("|")]
    names = tuple(map(_word, words))
    if len(set(names)) < max(2, len(names)) or not all(names):
        raise ConfigError(
            f"labels={short_repr(text)} of task {name!r} declares no two different classes; write labels=low|mid|high"
        )
    return names


class Columns(Frozen):
    """Options of a task."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    metric: Metric = "accuracy"
    positive: str | None = None
    """The class behind `f1:`."""
    target: str | None = None
    """Column that the model is to write: after the text, or the text itself where both are one column."""
    chat: str | None = None
    """Form of conversations (`chat.FORMS`), with the names of its columns where they are others."""
    system: str | None = None
    """Column of what a conversation begins with that says nothing of its own there."""
    tools: str | None = None
    """Column of the functions that a conversation may call."""
    template: str | None = None
    """Name or source of the chat template."""
    truncate: Truncation | None = None
    sep: str | None = None
    encoding: str | None = None
    missing: formats.Missing = "error"
    rows: str | None = None
    """Most rows that are drawn of each split."""
    labels: tuple[str, ...] = ()
    """Classes, in their order; those of the data where nobody declares them."""
    multi: str | None = None
    """Character between the labels in one cell, or a word of `SEPARATORS`; None: a cell is one label."""
    dealing: Dealing = field(default_factory=Dealing)

    @property
    def writes(self) -> bool:
        """Return whether there are no labels, but text to be written."""
        return self.target is not None or self.chat is not None

    @property
    def has_classes(self) -> bool:
        """Return whether its labels have names."""
        return not self.writes and self.metric != "pearson"

    def words(self, value: Any) -> tuple[str, ...]:
        """The names of the labels in a cell: one, or with `multi` those of a list or of its parts."""
        if self.multi is None:
            return (_word(value),)
        if isinstance(value, list | tuple):
            return tuple(dict.fromkeys(map(_word, value)))
        cell = "" if value is None or value != value else _word(value)
        parts = cell.split(formats.SEPARATORS.get(self.multi, self.multi))
        return tuple(dict.fromkeys(word for part in parts if (word := _word(part))))

    @property
    def chat_columns(self) -> dict[str, str]:
        """By name of its column, that of the form of conversations; none without one."""
        return {} if self.chat is None else chat.columns_of(self.chat)

    @property
    def reading(self) -> formats.Reading:
        """The columns that are read, and how."""
        kinds = dict.fromkeys((self.text, self.target or self.pair or self.text), "text")
        hint = f"; name the one to write {self.target!r} after with text=, or say text={self.target} for no prompt"
        if self.chat is not None:
            form, *_ = self.chat.split(":")
            kinds = {name: chat.FORMS[form][own] for name, own in self.chat_columns.items()}
            kinds |= {name: kind for name, kind in ((self.system, "optional"), (self.tools, "tools")) if name}
            hint = f"; say where your columns have other names: chat={':'.join([form, *chat.FORMS[form]])}"
        elif self.target is None:
            kinds[self.label] = "labels" if self.multi else "class" if self.has_classes else "number"
            hint = "; name the columns of the text and the label with text= and label="
        named = {**vars(self.dealing), "task": self.dealing.task_column}
        return formats.Reading(
            columns=(*kinds.items(), *self.dealing.kinds),
            sep=formats.SEPARATORS.get(self.sep or "", self.sep),
            encoding=self.encoding,
            missing=self.missing,
            rows=None if self.rows is None else int(self.rows),
            hint=hint,
            options={name: option for option, name in named.items() if isinstance(name, str)},
            class_names=self.has_classes,
        )


_OPTIONS = (
    *(option.name for option in fields(Columns) if option.name not in ("positive", "dealing")),
    *own_clients.OPTIONS,
)
_NOT_OF_CHATS = {"text", "pair", "label", "labels", "metric", "multi", "target"}
_CHOICES: Mapping[str, Sequence[str]] = {"truncate": TRUNCATIONS, "missing": formats.MISSING}


def _columns(name: str, options: Mapping[str, Any]) -> Columns:
    for key, value in options.items():
        check_known("task option", key, among=_OPTIONS)
        check_known(key, value, among=_CHOICES.get(key, (value,)))
    if "target" in options and (others := sorted({"pair", "label", "labels", "metric", "multi"} & options.keys())):
        raise ConfigError(
            f"task {name!r} has target= and {others[0]}=; what writes text has text= and target= alone, what has labels"
            " no target="
        )
    _check_chat(name, options)
    metric, colon, positive = options.get("metric", "micro_f1" if "multi" in options else "accuracy").partition(":")
    check_known("metric", metric, among=METRICS)
    if metric == "micro_f1" and "multi" not in options:
        raise ConfigError(
            f"task {name!r} has metric=micro_f1, which of one class a row is accuracy; say accuracy, or add multi=;"
        )
    if colon and (metric != "f1" or not positive):
        raise ConfigError(
            f"task {name!r} has metric={options['metric']}; a class stands behind f1 alone, as in metric=f1:yes"
        )
    own = {key: value for key, value in options.items() if key in own_clients.OPTIONS}
    labels = _declared_classes(name, options["labels"]) if "labels" in options else ()
    if labels and metric == "pearson":
        raise ConfigError(
            f"task {name!r} has labels= and metric=pearson, whose labels are values; leave one of them out"
        )
    columns = Columns(
        **{**{key: value for key, value in options.items() if key not in own}, "metric": metric, "labels": labels},
        positive=positive or None,
        dealing=own_clients.read_options(name, own),
    )
    _check_reading(name, columns)
    template = columns.template and Path(columns.template).expanduser()
    if template and template.is_file():
        check_regular(template)
        columns = replace(columns, template=template.read_text(encoding="utf-8"))
    return columns


def _check_chat(name: str, options: Mapping[str, str]) -> None:
    if "chat" not in options:
        if others := sorted({"system", "template", "tools"} & options.keys()):
            raise ConfigError(f"task {name!r} has {others[0]}= without chat=, the form of its conversations; add that")
        return
    chat.columns_of(options["chat"])
    if others := sorted(_NOT_OF_CHATS & options.keys()):
        raise ConfigError(
            f"task {name!r} has chat= and {others[0]}=; the form of conversations says which columns are read, as in"
            f" chat={':'.join(['alpaca', *chat.FORMS['alpaca']])}; leave {others[0]}= out"
        )


def _check_reading(name: str, columns: Columns) -> None:
    task = columns.dealing.task or ":"
    if columns.labels and ":" not in task:
        raise ConfigError(
            f"task {name!r} has labels= and task={task}, whose tasks have classes each; write a row of --task for each,"
            f" as in {name}=..,task={task}:WORD,labels=..|.."
        )
    for option, sep in (("sep", columns.sep), ("multi", columns.multi)):
        if sep is not None and len(sep) > 1 and sep not in formats.SEPARATORS:
            known = ", ".join(formats.SEPARATORS)
            raise ConfigError(
                f"{option}={sep} of task {name!r} is no separator; give one character, or a word of {known}"
            )
    if columns.multi is not None and columns.metric not in MULTILABEL_METRICS:
        raise ConfigError(
            f"task {name!r} has multi= and metric={columns.metric}; rows of several labels are judged by"
            f" {', '.join(MULTILABEL_METRICS)}: say one of these, or leave multi= out"
        )
    if not re.fullmatch(r"[1-9]\d{0,11}", columns.rows or "1"):
        raise ConfigError(f"rows={short_repr(columns.rows)} of task {name!r} is no number of rows from 1 on")
    try:
        "a".encode(columns.encoding or "utf-8")
    except (LookupError, UnicodeError, ValueError):
        known = "utf-8, utf-16, cp1252, latin-1, cp1251 or shift_jis"
        raise ConfigError(f"unknown encoding {columns.encoding!r} of task {name!r}; give one such as {known}") from None


def _positive(names: Sequence[str], columns: Columns, origin: str) -> int | None:
    if columns.positive is None:
        return None
    if columns.positive not in names:
        raise DataError(
            f"metric=f1:{short_repr(columns.positive)[1:-1]} names no class of {origin}; it has"
            f" {', '.join(map(repr, names[:SHOWN_CLASSES]))}{', ...' * (len(names) > SHOWN_CLASSES)}"
        )
    return names.index(columns.positive)


def _read_tables(path: Path, columns: Columns) -> tuple[dict[str, Table], tuple[str, ...]]:
    """The tables of a folder by split, or that of a file as `all`, and remarks on them."""
    if not path.is_dir():
        table, notes = read_rows([path], columns.reading)
        return {"all": table}, notes
    tables, notes = read_folder(path, columns.reading)
    if not {"train", "all"} & tables.keys():
        raise DataError(
            f"{path} has no train split; name a file {' or '.join(f'train{ending}' for ending in READERS)}, or for"
            " images give a folder of them for each class, or such folders in train and test; add client=file where"
            " each folder is a client's"
        )
    return tables, notes


def _make_task(
    name: str, data: TaskData, names: tuple[str, ...], columns: Columns, *, path: Path, clients: tuple[str, ...]
) -> Task:
    data = replace(data, notes=(*own_clients.name_notes(data.words, clients), *data.notes))
    return Task(
        name=name,
        num_labels=0 if columns.writes else len(names) or 1,
        chat=columns.chat is not None,
        template=columns.template,
        multilabel=columns.multi is not None,
        metric=columns.metric,
        truncate=columns.truncate,
        label_names=names,
        positive=_positive(names, columns, _origin(path, name, columns)),
        note=f"your own: {path}",
        clients=clients,
        load=lambda _: data,
    )


def _origin(path: Path, name: str, columns: Columns) -> str:
    return f"task {name!r} of {path}" if columns.dealing.task else str(path)


def _read_tasks(
    name: str, sources: tuple[tuple[str, Path], ...], columns: Columns, *_readers: object
) -> dict[str, tuple[TaskData, tuple[str, ...]]]:
    """By task the splits of files or folders, by the readers of this process, and the names of the classes."""
    tables: dict[Part, Table] = {}
    origins: dict[Part, str] = {}
    notes: list[str] = []
    for client, path in sources:
        of_path, messages = _read_tables(path, columns)
        tables |= {(client, split): table for split, table in of_path.items()}
        origins |= {(client, split): str(path) if split == "all" else f"{split} of {path}" for split in of_path}
        notes += [f"{path}: {note}" if len(sources) > 1 or columns.dealing.task else note for note in messages]
    by_task = own_clients.split_tasks(name, tables, columns.dealing, origin=sources[0][1])
    read = {}
    for task, of_task in by_task.items():
        data, names = _arrange_task(
            task, of_task, columns, origins=origins, origin=_origin(sources[0][1], task, columns)
        )
        read[task] = replace(data, notes=(*notes, *data.notes)), names
        notes = []  # those on files are told once
    return read


def _arrange_task(
    name: str, tables: Mapping[Part, Table], columns: Columns, *, origins: Mapping[Part, str], origin: str
) -> tuple[TaskData, tuple[str, ...]]:
    """The splits of a task, and the names of its classes."""
    names: tuple[str, ...] = ()
    if columns.chat is not None:
        rows = {part: _conversations(table, columns) for part, table in tables.items()}
    elif columns.target is not None:
        target = columns.target  # behind prompts, unless text= and target= are one column
        rows = {
            part: rows_to_write(
                _texts(table, target), prompts=None if columns.text == target else _texts(table, columns.text)
            )
            for part, table in tables.items()
        }
    else:
        rows, names = _labelled_rows(tables, columns, origins=origins, path=origin)
    dealt = own_clients.deal_rows(rows, tables, columns.dealing, name=name)
    if columns.dealing.client is not None:
        data = own_clients.arrange_clients(dealt, columns.dealing, name=name)
    else:
        # a class that labels= declares may be at other sites
        held_out = () if columns.labels or columns.multi else names
        labelled = not columns.writes and not columns.labels
        data = cleaning.arrange(dealt[""], name=name, labelled=labelled, label_names=held_out)
    return data, names


def _labelled_rows(
    tables: Mapping[Part, Table], columns: Columns, *, origins: Mapping[Part, str], path: str
) -> tuple[dict[Part, Rows], tuple[str, ...]]:
    """The rows by file and split, and the names of the classes; none of a regression."""
    names = columns.labels
    if columns.has_classes and not names:
        cells = [columns.words(value) for table in tables.values() for value in table[columns.label]]
        words = [word for own in cells for word in own]
        if columns.multi is not None and max(map(len, cells)) < 2:
            raise DataError(
                f"no row of {path} has two labels with multi={columns.multi} between them, as in"
                f" {short_repr(max(words, key=len, default=''))}; name the character that is there, leave multi= out"
                " for one class a row, or declare labels that are rarely together with labels="
            )
        column = columns.dealing.task_column
        alone = "" if column is None else f", or take other tasks alone, as in task={column}:WORD"
        names = _class_names(words, columns, origin=path, remedy=alone)
    rows = {}
    for part, table in tables.items():
        if columns.labels:
            _check_declared(table, columns, origin=origins[part])
        pair = None if columns.pair is None else _texts(table, columns.pair)
        label = _label_array(table, columns, names)
        rows[part] = Rows(text=_texts(table, columns.text), pair=pair, label=label)
    return rows, names


def _label_array(table: Table, columns: Columns, names: Sequence[str]) -> Labels:
    """The labels of a table's rows (`task.Labels`), numbered in the order of the names."""
    if not names:
        return np.asarray([float(value) for value in table[columns.label]], dtype=np.float32)
    numbers = {name: number for number, name in enumerate(names)}
    by_row = [[numbers[word] for word in columns.words(value)] for value in table[columns.label]]
    if columns.multi is None:
        return np.asarray([number for (number,) in by_row], dtype=np.int64)
    label = np.zeros((len(by_row), len(names)), dtype=np.float32)
    for row, own in zip(label, by_row, strict=True):
        row[own] = 1
    return label


def _check_declared(table: Table, columns: Columns, *, origin: str) -> None:
    words = (word for value in table[columns.label] for word in columns.words(value))
    other = Counter(word for word in words if word not in columns.labels)
    if other:
        (word, count), *_ = other.most_common()
        raise DataError(
            f"{origin} has {short_repr(word)} in column {columns.label!r} (rows: {count:,}), which is none of"
            f" the classes that labels= declares ({', '.join(columns.labels)}); mend the rows, or declare it"
        )


def _conversations(table: Table, columns: Columns) -> Rows:
    """A conversation a row; of preferences the chosen one, and beside it the rejected one."""
    (form, *_), own = str(columns.chat).split(":"), columns.chat_columns
    system, tools = (table[name] if name else repeat(None) for name in (columns.system, columns.tools))
    read = [
        chat.conversations(form, dict(zip(own.values(), values, strict=True)), system=first, tools=functions)
        for first, functions, *values in zip(system, tools, *(table[name] for name in own))
    ]
    pair = tuple(chat.to_text(rejected) for _, rejected in read) if form == "preference" else None
    words = np.asarray([chat.words(chosen) for chosen, *_ in read], dtype=np.float32)
    return Rows(text=tuple(chat.to_text(chosen) for chosen, *_ in read), pair=pair, label=words)


def _texts(table: Table, name: str) -> tuple[str, ...]:
    return tuple(map(str, table[name]))


def _class_names(labels: Sequence[str], columns: Columns, *, origin: str, remedy: str = "") -> tuple[str, ...]:
    words = set(labels)
    # `01` and `1` are two classes and one number: without the word beside it the order would be that of a set
    are_whole = all(re.fullmatch(_WHOLE_NUMBER, word) for word in words)
    names = sorted(words, key=lambda word: (int(word), word)) if are_whole else sorted(words)
    if not 2 <= len(names) <= max(2, len(labels) // 2):
        shown = f", such as {short_repr(names[0])}" if names else ""
        kind, where, other = "classes", "rows", "ask for a regression with metric=pearson"
        if columns.multi is not None:
            kind, where, other = "labels", "places", f"another character between labels than multi={columns.multi}"
        raise DataError(
            f"column {columns.label!r} of {origin} has {len(names)} different values in {len(labels)} {where}{shown};"
            f" allowed: two {kind} or more, of two rows each on average; name the label column with label=, or"
            f" {other}{remedy}"
        )
    return tuple(names)


def _word(value: Any) -> str:
    """Name of a label's class: 1, 1.0 and, as csv files have it, `1.0` are one class in every kind of file."""
    return re.sub(rf"^({_WHOLE_NUMBER})\.0*$", r"\1", own_clients.plain_word(value))


def _read_images(
    name: str,
    splits: tuple[tuple[Part, Path], ...],
    label_names: tuple[str, ...],
    size: int | None,
    dealing: Dealing,
    held_out: tuple[str, ...],
    validation_share: float | None,
) -> TaskData:
    """The splits of the images in these folders of classes; those `held_out` need a training image."""
    members = {
        part: [(file, label) for label, name in enumerate(label_names) for file in _images(folder / name)]
        for part, folder in splits
    }
    dealt = _stack_images(members, {file: _pixels(file, size) for files in members.values() for file, _ in files})
    if dealing.client is not None:
        return own_clients.arrange_clients(dealt, dealing, name=name, validation_share=validation_share)
    return cleaning.arrange(
        dealt[""], name=name, labelled=bool(held_out), label_names=held_out, validation_share=validation_share
    )


def _stack_images(
    members: Mapping[Part, Sequence[tuple[Path, int]]], pixels: Mapping[Path, Pixels]
) -> dict[str, dict[str, Images]]:
    """The splits of each client as `Images`: all grey or, where one has colours, all in three channels."""
    first = next(iter(pixels))
    height, width = pixels[first].shape[:2]
    for file, image in pixels.items():
        if image.shape[:2] != (height, width):
            raise DataError(
                f"images are of different sizes: {first} is {width} x {height} pixels and {file} is"
                f" {image.shape[1]} x {image.shape[0]}; add size={min(height, width)} to the task to bring them to one"
            )
    shape = (height, width, max(image.shape[2] for image in pixels.values()))
    stacked: dict[str, dict[str, Images]] = {}
    for (client, split), images in members.items():
        array = np.empty((len(images), *shape), dtype=np.uint8)
        for index, (file, _) in enumerate(images):
            array[index] = pixels[file]  # a grey image becomes three equal channels
        labels = np.asarray([label for _, label in images], dtype=np.int64)
        stacked.setdefault(client, {})[split] = Images(pixels=array, label=labels)
    return stacked


def folder_task(name: str, path: Path, options: Mapping[str, str], sources: Mapping[str, Path]) -> Task:
    """The task of `name=path,size=..`; a class is a folder, in the order of the names, or of labels=.

    Folders train and test, and validation where there is one, keep their splits (`cleaning.arrange`); one folder of
    classes is cut into splits (`cleaning.split_rows`). With client=file each of `sources` is such a folder of one
    client. With `size` every image is scaled so that its shorter side is so long, and cropped in the middle; without,
    all must be of one size. Images are read when the task is loaded.
    """
    check_known("option of a task of images", *options, among=_IMAGE_OPTIONS)
    size = options.get("size")
    if size is not None and not (size.isdecimal() and len(size) <= 4 and 0 < int(size) <= 4096):
        given = f"size={short_repr(size)} of task {name!r}"
        raise ConfigError(f"{given} is no number of pixels from 1 to 4096; the form is {IMAGE_FORM}")
    dealing = own_clients.read_options(name, {key: options[key] for key in ("client", "least") if key in options})
    if dealing.client not in (None, own_clients.BY_FILE):
        raise ConfigError(
            f"task {name!r} has client={dealing.client}, and images have no columns; write client={own_clients.BY_FILE}"
            " for a folder of each client, with a folder of each class in it"
        )
    classes = {word: folders for word, source in sources.items() if (folders := _class_folders(source))}
    splits = {(word, split): folder for word in classes for split, folder in _split_folders(sources[word]).items()}
    found = {one.name for folders in classes.values() for one in folders}
    label_names = _declared_classes(name, options["labels"]) if "labels" in options else tuple(sorted(found))
    if other := sorted(found - set(label_names)):
        raise DataError(
            f"{path} has a folder of images {other[0]!r}, which is none of the classes that labels= declares"
            f" ({', '.join(label_names)}); rename it, or declare it"
        )
    if len(label_names) < 2:
        raise DataError(
            f"{path} has images of one class only ({label_names[0]!r}); a task needs a folder for each of two"
        )
    stray = [str(source) for word, source in sources.items() if word not in classes]
    cut = [sources[word] for word in classes if sources[word] not in splits.values()]
    unnamed = [str(one) for folder in cut for one in _folders(folder) if one not in splits.values()]
    told = (*left_out_note(stray, since="since they hold no images by class"), *left_out_note(unnamed))
    clients: tuple[str, ...] = ()
    if dealing.client is not None:
        sizes = {word: sum(len(_images(one)) for one in folders) for word, folders in classes.items()}
        words = own_clients.large_enough(sizes, dealing, name=name)
        clients = own_clients.name_clients(words, prefix="client")
        told = (*own_clients.name_notes(words, clients), *told)
    pixels = None if size is None else int(size)
    held_out = () if "labels" in options else label_names

    def load(source: Source) -> TaskData:
        args = (name, tuple(splits.items()), label_names, pixels, dealing, held_out, source.validation_share)
        data = read_once(_read_images, *args, files=sources.values())
        return replace(data, notes=(*told, *data.notes))

    return Task(
        name=name,
        num_labels=len(label_names),
        images=True,
        label_names=label_names,
        note=f"your own images: {path}",
        clients=clients,
        load=load,
    )


def _class_folders(path: Path) -> list[Path]:
    """The folders of images in all splits of a folder."""
    splits = _split_folders(path).values() if path.is_dir() else ()
    return [folder for split in splits for folder in _folders(split) if _images(folder)]


def _folders(path: Path) -> list[Path]:
    # what begins with a dot is a program's own
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in _ENDINGS) if path.is_dir() else []


def _split_folders(path: Path) -> dict[str, Path]:
    """The folder of every split; `all` where no folder is named train, and one is for all of them."""
    folders = {split: folder for split in SPLITS for folder in find_split(_folders(path), split, origin=path)}
    return folders if "train" in folders else {"all": path}


def _pixels(file: Path, size: int | None) -> Pixels:
    """An image, uint8 (height, width, 1 or 3); a `DataError` says why it cannot be read."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        check_regular(file)
        with Image.open(file) as opened:
            # cameras write how they were held beside the pixels
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith(_WIDE):
                raise ValueError(f"its pixels are of mode {image.mode} and no bytes")
            grey = image.mode in ("1", "L", "LA")
            image = image.convert("L" if grey else "RGB")
            if size is not None:
                image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
            array: Pixels = np.asarray(image)
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"cannot read the image {file}: {reason}; mend or remove it") from error
    return array[..., None] if grey else array
