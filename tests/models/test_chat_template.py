"""Conversations as tokens: which of them are to be predicted, and what a longer one loses."""

import json
from importlib import resources

import pytest
from transformers import PreTrainedTokenizerBase

from atlas_fl.errors import ModelError
from atlas_fl.models.chat_template import TEMPLATES, ChatTemplate
from atlas_fl.models.tokenization import EncodedExamples, TextEncoder

# As published templates are: no marks, and what ends a turn is no end of text.
UNMARKED = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content.strip() + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
# Thoughts are kept in the last answer alone, as Qwen3 has it.
THINKING = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' }}"
    "{% if m.role == 'assistant' and loop.last %}<t></t>{% endif %}{{ m.content + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
# A text ends with a mark of its own behind the end of its last turn, as Phi-3 has it.
ENDING = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% else %}<end>{% endif %}"
)
REWRITING = "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }};{% endfor %}"
TWO_TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " yo "},
    {"role": "user", "content": "how"},
    {"role": "assistant", "content": "so"},
]


@pytest.fixture(scope="session")
def tokenizer(writer_of) -> PreTrainedTokenizerBase:
    """A tokenizer of single bytes, whose places are those of characters."""
    found: PreTrainedTokenizerBase = writer_of("qwen2").backbone.tokenizer
    return found


def encode(tokenizer, template: str | None, *chats: object, most: int = 200, **changes: object) -> EncodedExamples:
    texts = [json.dumps(chat) for chat in chats]
    given = ChatTemplate(tokenizer, template)
    return TextEncoder(tokenizer=tokenizer, max_length=most, **changes).chats(texts, given)  # type: ignore[arg-type]


def predicted(tokenizer, examples: EncodedExamples) -> list[str]:
    """Runs of tokens that are to be predicted, in all examples."""
    assert examples.target_mask is not None
    runs, before = list[list[int]](), False
    for token, is_target in zip(examples.ids.tolist(), examples.target_mask.tolist(), strict=True):
        if is_target:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = is_target
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (UNMARKED, ["yo<e>\n", "so<e>\n"]),
        (ENDING, [" yo <e>\n", "so<e>\n<end>"]),
        (THINKING, [" yo <e>\n", "<t></t>so<e>\n"]),
        ("plain", [" yo <|im_end|>", "so<|im_end|>"]),
        ("chatml", [" yo <|im_end|>", "so<|im_end|>"]),
        ("alpaca", [" yo <|im_end|>", "so<|im_end|>"]),
    ],
)
def test_the_answers_and_what_ends_them_are_predicted(tokenizer, template: str, answers: list[str]) -> None:
    assert predicted(tokenizer, encode(tokenizer, template, TWO_TURNS)) == answers


def test_an_example_is_the_text_of_its_template(tokenizer) -> None:
    examples = encode(tokenizer, UNMARKED, TWO_TURNS, TWO_TURNS[:2])
    whole = "<u>hi<e>\n<a>yo<e>\n"
    assert tokenizer.decode(examples.ids) == f"{whole}<u>how<e>\n<a>so<e>\n{whole}"
    assert examples.full_lengths is None and len(examples) == 2
    prompts = TextEncoder(tokenizer=tokenizer, max_length=200).chat_prompts(
        [json.dumps(TWO_TURNS)], template=ChatTemplate(tokenizer, UNMARKED)
    )
    assert tokenizer.decode(prompts.ids) == f"{whole}<u>how<e>\n<a>"
    assert prompts.target_mask is None


@pytest.mark.parametrize(
    ("closing", "end"),
    [("<|endoftext|>\n", "<|endoftext|>"), ("<|im_end|>\n<|endoftext|>", "<|im_end|>"), ("\n\n", None)],
)
def test_an_answer_to_a_prompt_ends_with_the_mark_behind_answers(tokenizer, closing: str, end: str | None) -> None:
    template = ChatTemplate(tokenizer, UNMARKED.replace("<e>\n", closing))
    prompts = TextEncoder(tokenizer=tokenizer, max_length=200).chat_prompts([json.dumps(TWO_TURNS)], template)
    assert prompts.ends == (() if end is None else (tokenizer.convert_tokens_to_ids(end),))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "gemma", "gemma3", "phi3", "phi3_5"])
def test_of_published_templates_the_answers_are_those_that_trl_marks(tokenizer, name: str) -> None:
    """TRL has a version of each with `{% generation %}` marks; one begins with the line break before the answer."""
    folder = resources.files("trl") / "chat_templates"
    texts = [folder.joinpath(f"{name}{kind}.jinja").read_text() for kind in ("", "_training")]
    turns = [{**turn, "content": turn["content"].strip()} for turn in TWO_TURNS]
    own, trls = (predicted(tokenizer, encode(tokenizer, text, turns, most=400)) for text in texts)
    assert [answer.strip() for answer in own] == [answer.strip() for answer in trls]
    assert [answer.strip()[:2] for answer in own] == ["yo", "so"]


WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Bern"}}}
CALLING = [
    {"role": "user", "content": "rain?", "tools": [WEATHER]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "name": "weather"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "and snow?"},
    {"role": "assistant", "content": "see", "tool_calls": [CALL, CALL]},
]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_calls_of_tools_are_answers_as_trl_marks_them(tokenizer, name: str) -> None:
    folder = resources.files("trl") / "chat_templates"
    texts = [folder.joinpath(f"{name}{kind}.jinja").read_text() for kind in ("", "_training")]
    own, trls = (encode(tokenizer, text, CALLING, most=3000) for text in texts)
    assert tokenizer.decode(own.ids) == tokenizer.decode(trls.ids)
    assert '{"name": "weather", "description": "of a town"' in tokenizer.decode(own.ids)
    answers = predicted(tokenizer, own)
    assert [answer.strip() for answer in answers] == [answer.strip() for answer in predicted(tokenizer, trls)]
    assert answers[0].count("<tool_call>") == 1 and '"Bern"' in answers[0] and "dry" not in "".join(answers)
    assert answers[2].startswith("see") and answers[2].count("<tool_call>") == 2


@pytest.mark.parametrize(
    ("chat", "name"), [(CALLING[:2], "tools"), ([{"role": "user", "content": "rain?"}, CALLING[1]], "tool_calls")]
)
def test_a_template_that_leaves_tools_out_is_refused(tokenizer, chat: object, name: str) -> None:
    with pytest.raises(ModelError, match=f"does not write the {name} of a conversation; give one that does"):
        encode(tokenizer, "chatml", chat)


def test_a_call_that_is_written_otherwise_later_is_refused(tokenizer) -> None:
    written = "(m.tools or '') | string + (m.tool_calls or 'x') | string + (loop.last and '!' or '?')"
    template = UNMARKED.replace("m.content.strip()", written)
    with pytest.raises(ModelError, match="in another way once the conversation goes on"):
        encode(tokenizer, template, CALLING[:4])


def test_the_tokenizers_own_template_is_taken_where_none_is_given(tokenizer) -> None:
    own = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=UNMARKED, eos_token="<|endoftext|>"
    )
    assert predicted(own, encode(own, None, TWO_TURNS)) == ["yo<e>\n", "so<e>\n"]


@pytest.mark.parametrize(
    ("changes", "most", "kept"),
    [
        ({}, 16, "<u>hi<e>\n<a>yo<e"),  # its tail goes
        ({}, 11, "ow<e>\n<a>so<e>\n"[-11:]),  # or its head, where no answer would be left
        ({"truncate": "head"}, 12, "w<e>\n<a>so<e>\n"[-12:]),
    ],
)
def test_a_longer_conversation_is_cut_where_an_answer_is_left(tokenizer, changes, most: int, kept: str) -> None:
    examples = encode(tokenizer, UNMARKED, TWO_TURNS, most=most, **changes)
    assert tokenizer.decode(examples.ids) == kept
    assert examples.full_lengths is not None and examples.full_lengths[0] == 37


def test_what_stands_first_is_not_predicted(tokenizer) -> None:
    examples = encode(tokenizer, UNMARKED, TWO_TURNS, most=4, truncate="head")
    assert examples.target_mask is not None and examples.target_mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (None, TWO_TURNS, "has no chat template; add template= to the task, .* one of chatml, alpaca, plain"),
        ("lama", TWO_TURNS, "template=lama is neither a Jinja file nor one of chatml"),
        (REWRITING, TWO_TURNS, "writes ' yo ' in another way once the conversation goes on"),
        ("{{ raise_exception('no system') }}", TWO_TURNS, r"refuses the conversation .*: no system; mend it, or give"),
        ("{% for %}", TWO_TURNS, "refuses the conversation"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(tokenizer, template: str | None, chat: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        encode(tokenizer, template, chat)


def test_no_answer_left_is_an_error(tokenizer) -> None:
    with pytest.raises(ModelError, match="no token of an answer is left of '<u>hi"):
        encode(tokenizer, UNMARKED, TWO_TURNS, most=1, truncate="head")


def test_a_template_writes_the_same_date_on_every_day(tokenizer) -> None:
    """As those of Llama 3.1 and 3.2 do, which write the day into the system message."""
    template = "{% set date = strftime_now('%d %b %Y') %}{{ date + ';' }}" + UNMARKED
    text = tokenizer.decode(encode(tokenizer, template, TWO_TURNS[:2]).ids)
    assert text == "26 Jul 2024;<u>hi<e>\n<a>yo<e>\n"


def test_a_template_runs_in_a_sandbox(tokenizer) -> None:
    with pytest.raises(ModelError, match="refuses the conversation"):
        encode(tokenizer, "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", TWO_TURNS)


def test_templates_by_name_agree_with_what_they_are_called(tokenizer) -> None:
    text = tokenizer.decode(encode(tokenizer, "chatml", TWO_TURNS[:2]).ids)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n yo <|im_end|>\n"
    text = tokenizer.decode(encode(tokenizer, "alpaca", TWO_TURNS[2:]).ids)
    assert text.endswith("request.\n\n### Instruction:\nhow\n\n### Response:\nso<|im_end|>\n\n")
    assert set(TEMPLATES) == {"chatml", "alpaca", "plain"}


def test_spaces_around_an_answer_that_are_no_tokens_hide_none_of_it(writer_of) -> None:
    """Of words between spaces the tokenizer knows no place of the spaces."""
    words = writer_of("llama").backbone.tokenizer
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": " w2 w3 "}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert predicted(words, encode(words, template, chat)) == ["w2 w3"]
