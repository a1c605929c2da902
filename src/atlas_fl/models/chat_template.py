"""Chat templates: conversations as the text that a model reads, and where in it the answers stand."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from atlas_fl.errors import ModelError, short_repr
from atlas_fl.packaged import packaged_tables

TEMPLATES: Mapping[str, str] = packaged_tables(__package__, "chat_templates.toml")
"""Chat templates (Jinja) by name, for tokenizers that have none; an answer ends with the tokenizer's end of text."""

TODAY = datetime(2024, 7, 26)
"""The date of templates that write today's, so that a run is the same on every day; Llama's own without a clock."""
_CLOCK = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")

Span = tuple[int, int]
"""[begin, end) in characters."""


class ChatTemplate:
    """A tokenizer's own chat template, one by name, or the Jinja source of one.

    Raises:
        ModelError: the tokenizer has none and none is given, or there is none of this name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
        known = ", ".join(TEMPLATES)
        source = tokenizer.chat_template if given is None else TEMPLATES.get(given, given)
        if source is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; add template= to the task, with the"
                f" path of a Jinja file or one of {known}"
            )
        if given is not None and "{" not in source:
            raise ModelError(f"template={given} is neither a Jinja file nor one of {known}; check the path")
        self._source = _CLOCK.sub(lambda call: repr(TODAY.strftime(call[2])), source)
        self._tokens = tokenizer.special_tokens_map
        self._marks_answers = re.search(r"{%-?\s*generation\b", source) is not None

    def prompt(self, chat: str) -> str:
        """A conversation, as JSON, without its last answer and with the opening of one."""
        return self._render(json.loads(chat)[:-1], add_generation_prompt=True)[0]

    def closing_text(self, chat: str) -> str:
        """The text behind the last answer of a conversation, given as JSON."""
        return self._render([*json.loads(chat)[:-1], {"role": "assistant", "content": "."}])[0].rpartition(".")[2]

    def answers(self, chat: str) -> tuple[str, list[Span]]:
        """(a conversation, given as JSON, and where in it every answer stands with its end).

        Where the template marks no answers (`{% generation %}`), one begins where the prompt before it ends, and ends
        with what ends the last one, but for what stands at the end of a text alone.

        Raises:
            ModelError: the template refuses the conversation, or does not let its answers be told apart.
        """
        messages = json.loads(chat)
        whole, spans = self._render(messages)
        for name in ("tools", "tool_calls"):
            without = [{key: value for key, value in turn.items() if key != name} for turn in messages]
            if without != messages and self._render(without)[0] == whole:
                raise ModelError(
                    f"the chat template does not write the {name} of a conversation; give one that does, such as"
                    " Qwen3's, by template="
                )
        if self._marks_answers:
            return whole, spans
        for place, turn in enumerate(messages):
            if turn["role"] == "assistant":
                before, _ = self._render(messages[:place], add_generation_prompt=True)
                end = self._end_of_answer(whole, messages[: place + 1], begin=len(before))
                if not whole.startswith(before) or end is None:
                    raise ModelError(
                        f"the chat template writes {short_repr(turn['content'])} in another way once the conversation"
                        " goes on, so that answers cannot be told apart; give one with {% generation %} marks by"
                        " template="
                    )
                spans.append((len(before), end))
        closing = whole[spans[-1][1] :]
        return whole, [(begin, end + _common_start(closing, whole[end:])) for begin, end in spans]

    def _end_of_answer(self, whole: str, messages: Sequence[Mapping[str, Any]], *, begin: int) -> int | None:
        """The end of the last of these messages in the text of all; None where it is written otherwise there."""
        content = messages[-1]["content"]
        if "tool_calls" in messages[-1]:  # each template writes them in its own way
            text = self._render(messages)[0].removesuffix(self.closing_text(json.dumps(messages)))
            return len(text) if whole.startswith(text) else None
        content = content if content in whole[begin:] else content.strip()
        place = whole.find(content, begin)
        return None if place < 0 else place + len(content)

    def _render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> tuple[str, list[Span]]:
        try:
            (text,), spans = render_jinja_template(
                [messages],
                tools=messages[0].get("tools") if messages else None,
                chat_template=self._source,
                return_assistant_tokens_mask=self._marks_answers,
                **how,
                **self._tokens,
            )
        except (TemplateError, TypeError) as error:
            raise ModelError(
                f"the chat template refuses the conversation {short_repr(json.dumps(messages, ensure_ascii=False))}:"
                f" {error}; mend it, or give another template by template="
            ) from None
        return text, [tuple(span) for span in spans[0]] if spans else []


def _common_start(closing: str, text: str) -> int:
    """Characters that a closing and this text begin with, without a part of a mark such as <|user|>."""
    common = "".join(one for one, other in takewhile(lambda pair: pair[0] == pair[1], zip(closing, text)))
    return len(common if common == closing else re.sub(r"<[^>]*$", "", common))
