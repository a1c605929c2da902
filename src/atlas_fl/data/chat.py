"""Conversations: chats, instructions and preferences in the forms in which they are published (`chat=`).

A row becomes a list of messages, each with a role (system, user, assistant or tool) and its content, as JSON; one of
the assistant may call tools, and the first says which there are (`tools=`). The forms are
those of TRL (`messages`, `completion`, `preference`), ShareGPT and Alpaca, and questions with choices, whose answer
carries its choices along.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from atlas_fl.errors import ConfigError, DataError, check_known, short_repr

Messages: TypeAlias = list[dict[str, Any]]
"""The turns of a conversation, each `{"role": .., "content": ..}`; an answer may have `"choices": [..]` beside it, or
`"tool_calls": [..]`, and the first message `"tools": [..]`."""

FORMS: Mapping[str, Mapping[str, str]] = {
    "messages": {"messages": "chat"},
    "sharegpt": {"conversations": "chat"},
    "alpaca": {"instruction": "text", "input": "input", "output": "text"},
    "completion": {"prompt": "turns", "completion": "turns"},
    "choices": {"question": "turns", "choices": "choices", "answer": "text"},
    "preference": {"prompt": "prompt", "chosen": "turns", "rejected": "turns"},
}
"""By form, its columns and what may be in them (`tables.CHECKS`)."""

ROLES: Mapping[str, str] = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""By the word that data have for it, the role of who speaks."""


def columns_of(form: str) -> dict[str, str]:
    """By name of the data's column, that of the form, as `alpaca` or `alpaca:question:context:answer` says.

    >>> columns_of("completion:ask:answer")
    {'ask': 'prompt', 'answer': 'completion'}

    Raises:
        ConfigError: there is no such form, or it has another number of columns.
    """
    name, *columns = form.split(":")
    check_known("form of conversations", name, among=FORMS)
    own = list(FORMS[name])
    if columns and (len(columns) != len(own) or len({*columns}) < len(own)):
        raise ConfigError(
            f"chat={form} does not name {len(own)} different columns; write {':'.join([name, *own])}"
            " with your names in their places, or completion:PROMPT:ANSWER for two columns of text"
        )
    return dict(zip(columns or own, own, strict=True))


def conversation_fault(value: Any) -> str:
    """Return what is wrong with a list of messages that is to end with an answer; empty where nothing is."""
    return _fault(value, lambda messages: "" if _answers(messages) else "no message of the assistant")


def turns_fault(value: Any) -> str:
    """Return what is wrong with a text, or a list of messages; empty where nothing is."""
    return "" if isinstance(_parsed(value), str) and value.strip() else _fault(value, lambda _: "")


def choices_fault(value: Any) -> str:
    """Return what is wrong with a list of different texts to choose from; empty where nothing is."""
    texts = _parsed(value)
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        return 'no list of texts such as ["a cat", "a dog"]'
    return (
        "" if len({text.strip() for text in texts}) == len(texts) > 1 else "a list without two or more different texts"
    )


def _fault(value: Any, check: Callable[[Messages], str]) -> str:
    turns = _parsed(value)
    if turns is None or turns == "":
        return "no value"
    if not isinstance(turns, list) or not turns:
        return 'no list of messages such as [{"role": "user", "content": ".."}, ..]'
    for number, turn in enumerate(turns, start=1):
        role, content = _role(turn), _content(turn)
        if role is None or content is None:
            return f"message {number} without a role and a content"
        if role not in ROLES:
            return f"message {number} of the role {role!r}, which is none of {', '.join(ROLES)},"
        if turn.get("tool_calls") and (ROLES[role] != "assistant" or _calls(turn) is None):
            return f"message {number} with tool_calls that are none of an assistant, each with a name and arguments,"
    return check(_messages(turns))


def _parsed(value: Any, *, opening: str = "[") -> Any:
    """The cell, or what stands in it as JSON: a cell of csv holds a list as text."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _role(turn: Any) -> Any:
    return turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None


def _content(turn: Mapping[str, Any]) -> str | None:
    """The text of a message, whose parts may stand in a list as they do for models that see."""
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def _messages(value: Any, *, role: str = "user") -> Messages:
    """The messages of a sound cell; a text is one message of this role."""
    turns = _parsed(value)
    if not isinstance(turns, list):
        return [{"role": role, "content": str(turns)}]
    return [{"role": ROLES[_role(turn)], "content": _content(turn) or "", **_of_tools(turn)} for turn in turns]


def _of_tools(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a message where tools are called: its calls, or the call that it is the result of."""
    named = {name: turn[name] for name in ("name", "tool_call_id") if turn.get(name)}
    return named | ({"tool_calls": _calls(turn)} if turn.get("tool_calls") else {})


def _calls(turn: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of a message, with arguments as a mapping, which OpenAI's API has as text; None for an unsound one."""
    calls: list[dict[str, Any]] = []
    for call in turn["tool_calls"] if isinstance(turn["tool_calls"], list) else [None]:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = _parsed(function.get("arguments"), opening="{")
        if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
            return None
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}})
    return calls


def _answers(messages: Messages) -> list[str]:
    """The answers as texts; one that only calls tools as its calls in JSON."""
    answers = [turn for turn in messages if turn["role"] == "assistant"]
    return [
        json.dumps(turn["tool_calls"], ensure_ascii=False)
        if "tool_calls" in turn and not turn["content"]
        else turn["content"]
        for turn in answers
    ]


def tools_fault(value: Any) -> str:
    """Return what is wrong with a list of functions that may be called; empty where nothing is, or none is given."""
    tools = _parsed(value) or []
    sound = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    return "" if sound else 'no list of functions such as [{"type": "function", "function": {"name": ..}}]'


def conversations(
    form: str, values: Mapping[str, Any], *, system: str | None = None, tools: Any = None
) -> tuple[Messages, ...]:
    """The conversation of a row, by column of the form; of a preference (the chosen, the rejected) one.

    What follows the last answer is left out. A conversation without a system message of its own begins with `system`.
    The first message of each has the `tools` that may be called, where there are any.
    """
    if form == "alpaca":
        given = "\n\n".join(str(values[name]) for name in ("instruction", "input") if values[name])
        chats = [[*_messages(given), *_messages(values["output"], role="assistant")]]
    elif form == "choices":
        chosen = _choose(
            [text.strip() for text in _parsed(values["choices"])], values["answer"], asked=values["question"]
        )
        chats = [[*_messages(values["question"]), chosen]]
    elif form in ("completion", "preference"):
        prompt = _messages(values["prompt"]) if values["prompt"] else []
        ends = [_messages(values[name], role="assistant") for name in FORMS[form] if name != "prompt"]
        # a preference of whole conversations has its prompt in both
        chats = [end if end[0]["role"] != "assistant" else prompt + end for end in ends]
        if answer := next((chat[0]["content"] for chat in chats if chat[0]["role"] == "assistant"), ""):
            raise DataError(
                f"no prompt to the answer {short_repr(answer)}; add a column for it, or give chosen and rejected"
                " as lists of messages that begin with it"
            )
    else:
        (value,) = values.values()
        chats = [_messages(value)]
    first: Messages = [{"role": "system", "content": system}] if system else []
    ended: list[Messages] = [(first if one[0]["role"] != "system" else []) + _to_last_answer(one) for one in chats]
    beside = {"tools": _parsed(tools)} if tools else {}
    return tuple([{**chat[0], **beside}, *chat[1:]] for chat in ended)


def _choose(choices: list[str], answer: Any, *, asked: Any) -> dict[str, Any]:
    """The answer to a question with choices: a number from 0 on, or a text that is one of them or such a number."""
    text = str(answer).strip()
    is_number = text.isdecimal() and int(text) < len(choices)
    if is_number and (isinstance(answer, int) or text not in choices):
        text = choices[int(text)]
    if text not in choices:
        raise DataError(
            f"the answer {short_repr(answer)} to {short_repr(asked)} is none of its choices {short_repr(choices)}; give"
            f" one of them, or its number from 0 to {len(choices) - 1}"
        )
    return {"role": "assistant", "content": text, "choices": choices}


def _to_last_answer(messages: Messages) -> Messages:
    last = max((place for place, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)
    return messages[: last + 1] or messages


def words(messages: Messages) -> int:
    """Number of words of the answers."""
    return sum(len(answer.split()) for answer in _answers(messages))


def to_text(messages: Messages) -> str:
    """A conversation as the text of a row."""
    return json.dumps(messages, ensure_ascii=False)


def from_text(text: str) -> Messages:
    """The conversation of a row's text."""
    messages: Messages = json.loads(text)
    return messages


def choices_of(text: str) -> list[str]:
    """The choices of a row's last answer; none where it has none."""
    choices: list[str] = from_text(text)[-1].get("choices", [])
    return choices


def last_answer(text: str) -> str:
    """The last answer of a row's conversation."""
    return _answers(json.loads(text))[-1]
