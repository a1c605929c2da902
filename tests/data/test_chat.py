"""Conversations in the forms in which they are published, by columns of a user's file."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from atlas_fl.data.chat import conversations, last_answer, to_text
from atlas_fl.data.task import Rows, Source, Task
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import ConfigError, DataError

NOWHERE = Source(cache_dir=Path("/nowhere"))
USER, ANSWER = {"role": "user", "content": "Hi {i}"}, {"role": "assistant", "content": "Yo {i}"}
SHAREGPT = [{"from": "human", "value": "Hi {i}"}, {"from": "gpt", "value": "Yo {i}"}]
TURNS = [USER, ANSWER]


def row_of(values: Any, i: int) -> Any:
    return json.loads(json.dumps(values).replace("{i}", str(i)))


def task_of(folder: Path, values: Any, options: str, *, count: int = 40) -> Task:
    """The task of so many rows of these values, in which `{i}` is the number of the row."""
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row_of(values, i)) + "\n" for i in range(count)))
    (task,) = parse_tasks(f"help={path},{options}")
    return task


def first_conversation(task: Task) -> Any:
    train = task.load(NOWHERE).train
    assert isinstance(train, Rows)
    return json.loads(train.text[0])


def expected(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


FORMS = {
    "messages": ({"messages": TURNS}, "chat=messages"),
    "another-column": ({"talk": TURNS}, "chat=messages:talk"),
    "text-of-json": ({"messages": json.dumps(TURNS)}, "chat=messages"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi {i}"}]}, ANSWER]},
        "chat=messages",
    ),
    "after-the-last-answer": ({"messages": [*TURNS, {"role": "user", "content": "bye"}]}, "chat=messages"),
    "sharegpt": ({"conversations": SHAREGPT}, "chat=sharegpt"),
    "alpaca": ({"instruction": "Hi {i}", "input": None, "output": "Yo {i}"}, "chat=alpaca"),
    "alpaca-without-input": ({"instruction": "Hi {i}", "output": "Yo {i}"}, "chat=alpaca"),
    "completion": ({"prompt": "Hi {i}", "completion": "Yo {i}"}, "chat=completion"),
    "completion-of-messages": ({"prompt": [USER], "completion": [ANSWER]}, "chat=completion"),
    "renamed": ({"ask": "Hi {i}", "say": "Yo {i}"}, "chat=completion:ask:say"),
    "preference": ({"prompt": "Hi {i}", "chosen": "Yo {i}", "rejected": "No {i}"}, "chat=preference"),
    "whole-preference": (
        {"prompt": "Hi {i}", "chosen": TURNS, "rejected": [USER, {"role": "assistant", "content": "No {i}"}]},
        "chat=preference",
    ),
    "preference-without-prompt": (
        {"chosen": TURNS, "rejected": [USER, {"role": "assistant", "content": "No {i}"}]},
        "chat=preference",
    ),
}


@pytest.mark.parametrize(("values", "options"), FORMS.values(), ids=FORMS)
def test_each_form_becomes_the_same_messages(values: Any, options: str, tmp_path: Path) -> None:
    task = task_of(tmp_path, values, options)
    assert (task.writes, task.chat, task.template) == (True, True, None)
    found = first_conversation(task)
    number = found[0]["content"].split()[-1]
    assert found == expected(("user", f"Hi {number}"), ("assistant", f"Yo {number}"))
    train = task.load(NOWHERE).train
    assert isinstance(train, Rows)
    if train.pair is not None:
        assert json.loads(train.pair[0]) == expected(("user", f"Hi {number}"), ("assistant", f"No {number}"))
    assert (train.pair is not None) == ("preference" in options)
    assert set(train.label.tolist()) == {2.0}, "the words of the answers"


@pytest.mark.parametrize("how", ["csv", "parquet", "saved"])
def test_columns_that_may_lack_do_in_every_kind_of_table(how: str, tmp_path: Path) -> None:
    turns = [[row_of(turn, i) for turn in TURNS] for i in range(40)]
    rows = Dataset.from_dict({"chosen": turns, "rejected": [[ask, {**say, "content": "No"}] for ask, say in turns]})
    place = tmp_path / f"pairs{'' if how == 'saved' else f'.{how}'}"
    if how == "csv":
        rows.map(lambda row: {name: json.dumps(turns) for name, turns in row.items()}).to_csv(place)
    else:
        (rows.to_parquet if how == "parquet" else DatasetDict(train=rows).save_to_disk)(place)
    (task,) = parse_tasks(f"wish={place},chat=preference")
    assert first_conversation(task)[0]["content"].startswith("Hi ")


def test_an_answer_without_a_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompt to the answer 'Yo \d+'; add a column for it, or give chosen and"):
        task_of(tmp_path, {"chosen": "Yo {i}", "rejected": "No {i}"}, "chat=preference")
    with pytest.raises(DataError, match="no column 'tone'"):
        task_of(tmp_path, {"messages": TURNS}, "chat=messages,system=tone")


def test_an_input_follows_its_instruction_and_a_system_column_comes_first(tmp_path: Path) -> None:
    values = {"instruction": "Add {i}", "input": "1 2", "output": "3", "tone": "Be kind."}
    found = first_conversation(task_of(tmp_path, values, "chat=alpaca,system=tone"))
    number = found[1]["content"].splitlines()[0].split()[-1]
    assert found == expected(("system", "Be kind."), ("user", f"Add {number}\n\n1 2"), ("assistant", "3"))
    own = {"messages": [{"role": "system", "content": "Be brief."}, *TURNS], "tone": "Be kind."}
    assert first_conversation(task_of(tmp_path, own, "chat=messages,system=tone"))[0]["content"] == "Be brief."
    unsaid = {"messages": TURNS, "tone": None}
    assert first_conversation(task_of(tmp_path, unsaid, "chat=messages,system=tone"))[0]["role"] == "user"


def test_clients_by_a_column_and_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": row_of(TURNS, i), "site": f"s{i % 2}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = parse_tasks(f"help={path},chat=messages,client=site,template={tmp_path}/own.jinja")
    assert (task.clients, task.template) == (("s0", "s1"), "{{ messages }}")
    (named,) = parse_tasks(f"help={path},chat=messages,template=chatml")
    assert named.template == "chatml"


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": {i}}'}}
FUNCTIONS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLING = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "{i}", "tool_call_id": "c1"},
    ANSWER,
]


@pytest.mark.parametrize("as_text", [False, True])
def test_calls_of_tools_their_results_and_the_functions_are_kept(as_text: bool, tmp_path: Path) -> None:
    cell = json.dumps if as_text else list
    task = task_of(tmp_path, {"messages": CALLING, "functions": cell(FUNCTIONS)}, "chat=messages,tools=functions")
    first, called, result, answer = first_conversation(task)
    number = first["content"].removeprefix("Hi ")
    assert first == {"role": "user", "content": f"Hi {number}", "tools": FUNCTIONS}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": int(number)}}}
    assert called == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert result == {"role": "tool", "content": number, "tool_call_id": "c1"}
    assert answer == {"role": "assistant", "content": f"Yo {number}"}


def test_functions_that_are_no_list_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no list of functions such as .* in 'functions'"):
        task_of(tmp_path, {"messages": TURNS, "functions": "add"}, "chat=messages,tools=functions")


def test_a_last_answer_that_calls_tools_is_its_calls() -> None:
    (messages,) = conversations("messages", {"messages": row_of(CALLING[:2], 3)})
    assert json.loads(last_answer(to_text(messages))) == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
    ]


def test_an_empty_answer_is_an_empty_text() -> None:
    (messages,) = conversations("messages", {"messages": [USER, {"role": "assistant", "content": ""}]})
    assert last_answer(to_text(messages)) == ""


BAD = {
    "calls-of-a-user": (
        [{**USER, "tool_calls": [CALL]}, ANSWER],
        "message 1 with tool_calls that are none of",
    ),
    "calls-no-list": ([USER, {"role": "assistant", "tool_calls": {"name": "add"}}], "message 2 with tool_calls that"),
    "calls-without-arguments": ([USER, {"role": "assistant", "tool_calls": [{"name": "add"}]}], "each with a name and"),
    "arguments-no-mapping": (
        [USER, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "1"}]}],
        "each with a name and arguments",
    ),
    "no-answer": ([USER], "no message of the assistant in 'messages'"),
    "no-list": ("Hi", "no list of messages such as"),
    "empty": ([], "no list of messages such as"),
    "no-role": ([{"content": "Hi"}], "message 1 without a role and a content"),
    "picture": ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], "message 1 without a role and a content"),
    "other-role": (
        [{"role": "judge", "content": "Hi"}, ANSWER],
        "message 1 of the role 'judge', which is none of user",
    ),
    "missing": (None, "no value in 'messages'"),
}


@pytest.mark.parametrize(("value", "message"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named(value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": TURNS}] * 3 + [{"messages": value}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"has 1 problem.* in row 4") as caught:
        parse_tasks(f"help={path},chat=messages")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("chat=mesages", "unknown form of conversations 'mesages'"),
        ("chat=alpaca:ask:say", "does not name 3 different columns; write alpaca:instruction:input:output with your"),
        ("chat=messages,label=a", "chat= and label=; the form of conversations says which columns are read"),
        ("template=chatml", "has template= without chat="),
        ("tools=messages", "has tools= without chat="),
        ("chat=sharegpt", "no column 'conversations'.* it has 'messages'; say where your columns have other names"),
    ],
)
def test_what_is_wrong_with_the_description_is_said(options: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        task_of(tmp_path, {"messages": TURNS}, options)


QUIZ = {"question": "Hi {i}", "choices": ["No {i}", "Yo {i}", "2"]}


@pytest.mark.parametrize(
    ("answer", "chosen"), [("Yo {i}", "Yo {i}"), (1, "Yo {i}"), ("1", "Yo {i}"), (2, "2"), ("2", "2"), ("0", "No {i}")]
)
def test_a_question_carries_its_choices_and_is_answered_by_one(answer: Any, chosen: str, tmp_path: Path) -> None:
    asked, found = first_conversation(task_of(tmp_path, QUIZ | {"answer": answer}, "chat=choices"))
    own = row_of({"choices": QUIZ["choices"], "content": chosen}, int(asked["content"].split()[-1]))
    assert found == {"role": "assistant", **own}
    renamed = {"ctx": "Hi {i}", "endings": json.dumps(QUIZ["choices"]), "label": answer}
    assert first_conversation(task_of(tmp_path, renamed, "chat=choices:ctx:endings:label"))[1]["choices"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"answer": "Yes"}, "the answer 'Yes' to 'Hi 0' is none of its choices .* or its number from 0 to 2"),
        ({"answer": 3}, "the answer 3 to 'Hi 0' is none of its choices"),
        ({"answer": 0, "choices": ["a"]}, "a list without two or more different texts in 'choices'"),
        ({"answer": 0, "choices": ["a", " a"]}, "a list without two or more different texts in 'choices'"),
        ({"answer": 0, "choices": "a|b"}, "no list of texts such as .* in 'choices'"),
    ],
)
def test_what_is_wrong_with_choices_is_said(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        task_of(tmp_path, QUIZ | values, "chat=choices")
