"""Instructions to follow, made of embedded data: questions, reviews, messages and sentences, answered in four tones.

What is asked does not say in which tone it is answered, so that clients of several tones disagree. The splits are those
of the embedded task: a text that one tone is tested on is trained on in none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from atlas_fl.data.chat import to_text, words
from atlas_fl.data.embedded import EMBEDDED
from atlas_fl.data.task import Examples, Rows, Source, Task, TaskData, as_texts, load_task
from atlas_fl.packaged import packaged_tables

_TABLES: Mapping[str, Any] = packaged_tables(__package__, "chat_tasks.toml")
TONES: Mapping[str, str] = _TABLES["tones"]
TOPICS: Mapping[str, Mapping[str, Any]] = _TABLES["topics"]


def _asked(topic: str, rows: Rows, *, tone: str) -> Iterator[tuple[str, str]]:
    """(what is asked of a text, the answer) of every row that has one."""
    table = TOPICS[topic]
    answers = table.get(tone, table.get("english"))
    for place, text in enumerate(rows.text):
        if answers is not None:
            yield f"{table['ask']}\n\n{text}", answers[int(rows.label[place])]
        elif rows.pair is not None:
            if rows.label[place] == 1:  # the description of the question's own type
                yield f"{table['ask']}\n\n{text}", rows.pair[place]
        else:
            found = text.split()
            at = len(text) % max(1, len(found) - 1)
            if len(found) > 1 and found.count(found[at]) == 1:
                yield f"{table['ask'].format(word=found[at])}\n\n{text}", found[at + 1]


def make_chats(topic: str, rows: Examples, *, tone: str) -> Rows:
    """The conversations that these rows give, a question and its answer each."""
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": TONES[tone].format(answer=answer)}]
        for question, answer in _asked(topic, as_texts(rows, task=topic), tone=tone)
    ]
    label = np.asarray([words(chat) for chat in chats], dtype=np.float32)
    return Rows(text=tuple(map(to_text, chats)), label=label)


def _task(topic: str, tone: str) -> Task:
    source_task = next(task for task in EMBEDDED if task.name == TOPICS[topic]["task"])

    def load(source: Source) -> TaskData:
        data = replace(load_task(source_task, source), left_out=0)
        return data.with_splits(lambda split: make_chats(topic, data.splits[split], tone=tone))

    note = f"instructions made of {source_task.name}, answered in the tone {tone}"
    return Task(name=f"{topic}_{tone}", num_labels=0, chat=True, note=note, load=load, files=source_task.files)


CHAT_TASKS: tuple[Task, ...] = tuple(_task(topic, tone) for topic in TOPICS for tone in TONES)
