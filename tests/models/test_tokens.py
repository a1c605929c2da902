import copy
import dataclasses

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from atlas_fl.errors import ModelError
from atlas_fl.models.tokenization import EncodedExamples, TextEncoder
from atlas_fl.params import Truncation

THREE = EncodedExamples(
    ids=np.array([1, 2, 3, 4, 5, 6]),
    types=np.array([0, 0, 1, 0, 0, 1]),
    offsets=np.array([0, 3, 4, 6]),
    labels=np.array([7, 8, 9]),
)


PROMPTS, ANSWERS = ["w1 w2", "w1 w2 w3 w4 w5", "w1"], ["w3", "w6 w7", "w2 w3 w4 w5 w6 w7 w8"]


def test_taking_examples_by_hand() -> None:
    taken = THREE.take(np.array([2, 0, 2]))
    assert taken.ids.tolist() == [5, 6, 1, 2, 3, 5, 6]
    assert taken.types.tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert taken.offsets.tolist() == [0, 2, 5, 7]
    assert taken.labels.tolist() == [9, 7, 9]
    assert (len(THREE), THREE.lengths.tolist()) == (3, [3, 1, 2])


def test_encoding_gives_the_tokenizers_own_tokens_cut_to_length(tiny) -> None:
    tokenizer = tiny.backbone.tokenizer
    text, pair = ["w1 w2 w3", "w4"], ["w5", "w6 w7 w8 w9 w10 w11 w12"]
    encoded = TextEncoder(tokenizer=tokenizer, max_length=8).examples(text, pair, np.array([0, 1]))
    for i in range(2):
        alone = tokenizer(text[i], pair[i], truncation=True, max_length=8)
        part = encoded.take(np.array([i]))
        assert part.ids.tolist() == alone["input_ids"]
        assert part.types.tolist() == alone.get("token_type_ids", [0] * len(alone["input_ids"]))
    assert encoded.lengths.max() == 8
    assert encoded.types.any() == (tiny.name in ("bert", "electra"))


def test_tokens_to_be_predicted_go_with_their_examples() -> None:
    marked = dataclasses.replace(THREE, target_mask=np.array([False, True, True, False, False, True]))
    assert marked.num_targets.tolist() == [2, 0, 1]
    taken = marked.take(np.array([2, 0]))
    assert taken.target_mask.tolist() == [False, True, False, True, True]
    assert taken.num_targets.tolist() == [1, 2]
    assert THREE.num_targets.tolist() == [0, 0, 0]


def spelled(encoded: EncodedExamples, tokenizer) -> list[str]:
    """Every example's tokens; those to be predicted in brackets."""
    words = tokenizer.convert_ids_to_tokens(encoded.ids.tolist())
    marks = np.zeros(len(words), bool) if encoded.target_mask is None else encoded.target_mask
    shown = [f"[{word}]" if mark else word for word, mark in zip(words, marks)]
    return [" ".join(shown[start:stop]) for start, stop in zip(encoded.offsets[:-1], encoded.offsets[1:])]


def test_text_by_hand(tiny_of) -> None:
    tokenizer = tiny_of("gpt2").backbone.tokenizer
    found = TextEncoder(tokenizer=tokenizer, max_length=5).targets(["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"], None)
    end = "[<|endoftext|>]"
    assert spelled(found, tokenizer) == [f"w1 [w2] [w3] {end}", f"w4 {end}", "w5 [w6] [w7] [w8] [w9]"]
    assert not found.types.any()
    assert len(found.labels) == 3


def test_text_after_prompts_by_hand(tiny_of) -> None:
    """Llama's tokenizer begins every text with <s>, which a prompt keeps when it loses its beginning."""
    tokenizer = tiny_of("llama").backbone.tokenizer
    found = TextEncoder(tokenizer=tokenizer, max_length=6).targets(PROMPTS, ANSWERS)
    lines = ["<s> w1 w2 [w3] [</s>]", "<s> w4 w5 [w6] [w7] [</s>]", "w1 [w2] [w3] [w4] [w5] [w6]"]
    assert spelled(found, tokenizer) == lines
    prompts = TextEncoder(tokenizer=tokenizer, max_length=4).prompts(PROMPTS)
    assert spelled(prompts, tokenizer) == ["<s> w1 w2", "<s> w3 w4 w5", "<s> w1"]
    assert prompts.target_mask is None


def test_a_line_break_stands_between_prompt_and_answer(tiny_of) -> None:
    """Qwen2's test tokenizer knows bytes, GPT-2's way of a line break among them."""
    tokenizer = copy.deepcopy(tiny_of("qwen2").backbone.tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found = TextEncoder(tokenizer=tokenizer, max_length=9).targets(["ab"], ["c"])
    assert spelled(found, tokenizer) == ["a b \u010a [c] [<|im_end|>]"]


def full_and_kept(encoded: EncodedExamples) -> list[tuple[int, int]] | None:
    return None if encoded.full_lengths is None else list(zip(encoded.full_lengths.tolist(), encoded.lengths.tolist()))


def test_examples_remember_how_long_they_were_before_they_were_cut(tiny_of) -> None:
    tokenizer, labels = tiny_of("bert").backbone.tokenizer, np.zeros(3)
    text = ["w1 w2 w3 w4 w5 w6 w7", "w1", "w1 w2 w3 w4"]
    cut = TextEncoder(tokenizer=tokenizer, max_length=6).examples(text, None, labels)
    assert full_and_kept(cut) == [(9, 6), (3, 3), (6, 6)]
    pairs = TextEncoder(tokenizer=tokenizer, max_length=8).examples(text, text[::-1], labels)
    assert full_and_kept(pairs) == [(14, 8), (5, 5), (14, 8)]
    assert full_and_kept(TextEncoder(tokenizer=tokenizer, max_length=9).examples(text, None, labels)) is None
    assert cut.digest == dataclasses.replace(cut, full_lengths=None).digest


def test_texts_that_are_written_remember_it_too(tiny_of) -> None:
    tokenizer = tiny_of("llama").backbone.tokenizer
    answers = TextEncoder(tokenizer=tokenizer, max_length=6).targets(PROMPTS, ANSWERS)
    assert full_and_kept(answers) == [(5, 5), (9, 6), (10, 6)]
    assert full_and_kept(TextEncoder(tokenizer=tokenizer, max_length=5).targets(PROMPTS, None)) == [
        (4, 4),
        (7, 5),
        (3, 3),
    ]
    assert full_and_kept(TextEncoder(tokenizer=tokenizer, max_length=4).prompts(PROMPTS)) == [(3, 3), (6, 4), (2, 2)]
    assert TextEncoder(tokenizer=tokenizer, max_length=20).targets(PROMPTS, ANSWERS).full_lengths is None


PARTS = [("tail", "w1 w2 w3 w4"), ("head", "w4 w5 w6 w7"), ("middle", "w1 w2 w6 w7")]


@pytest.mark.parametrize(("truncate", "kept"), PARTS)
@pytest.mark.parametrize("architecture", ["bert", "llama", "roberta"])
def test_a_longer_text_loses_its_tail_head_or_middle_and_no_mark(
    architecture: str, truncate: Truncation, kept: str, tiny_of
) -> None:
    tokenizer, text = tiny_of(architecture).backbone.tokenizer, ["w1 w2 w3 w4 w5 w6 w7", "w8"]
    marks = len(tokenizer(["w1"])["input_ids"][0]) - 1
    cut = TextEncoder(tokenizer=tokenizer, max_length=4 + marks, truncate=truncate).examples(text, None, np.zeros(2))
    expected = tokenizer([kept, "w8"])["input_ids"]
    assert cut.ids.tolist() == [token for row in expected for token in row]
    assert full_and_kept(cut) == [(7 + marks, 4 + marks), (1 + marks, 1 + marks)]
    if truncate == "tail":
        assert (
            cut.digest
            == TextEncoder(tokenizer=tokenizer, max_length=4 + marks).examples(text, None, np.zeros(2)).digest
        )


@pytest.mark.parametrize(("truncate", "kept"), PARTS)
def test_of_a_pair_each_text_loses_that_part_and_keeps_its_type(truncate: Truncation, kept: str, tiny_of) -> None:
    tokenizer = tiny_of("bert").backbone.tokenizer
    cut = TextEncoder(tokenizer=tokenizer, max_length=9, truncate=truncate).examples(
        ["w8 w9"], ["w1 w2 w3 w4 w5 w6 w7"], np.zeros(1)
    )
    expected = tokenizer(["w8 w9"], [kept])
    assert cut.ids.tolist() == expected["input_ids"][0] and cut.types.tolist() == expected["token_type_ids"][0]


@pytest.mark.parametrize(
    ("truncate", "alone", "after"),
    [
        (None, "<s> [w1] [w2]", "<s> w5 w6 [w8]"),
        ("tail", "<s> [w1] [w2]", "<s> w1 w6 [w8]"),
        ("head", "w5 [w6] [</s>]", "<s> w5 w6 [w8]"),
        ("middle", "<s> [w1] [</s>]", "<s> w1 w6 [w8]"),
    ],
)
def test_what_is_written_loses_that_part_and_a_prompt_keeps_its_last_token(
    truncate: Truncation | None, alone: str, after: str, tiny_of
) -> None:
    """Llama's test tokenizer has no token of a line break: the last of a prompt stands for it."""
    tokenizer, text = tiny_of("llama").backbone.tokenizer, ["w1 w2 w3 w4 w5 w6"]
    written = TextEncoder(tokenizer=tokenizer, max_length=3, truncate=truncate).targets(text, None)
    assert spelled(written, tokenizer) == [alone]
    answered = TextEncoder(tokenizer=tokenizer, max_length=5, truncate=truncate).targets(text, ["w8"])
    assert spelled(answered, tokenizer) == [f"{after} [</s>]"]
    prompts = TextEncoder(tokenizer=tokenizer, max_length=3, truncate=truncate).prompts(text)
    assert spelled(prompts, tokenizer) == [after.rpartition(" ")[0]]


def test_a_tokenizer_without_an_end_of_text_is_refused(tiny_of) -> None:
    tokenizer = tiny_of("bert").backbone.tokenizer
    with pytest.raises(ModelError, match=r"the tokenizer of .* has no end-of-text token"):
        TextEncoder(tokenizer=tokenizer, max_length=9).targets(["w1"], None)


def test_a_text_without_a_token_is_named(tiny_of) -> None:
    tokenizer = copy.deepcopy(tiny_of("qwen2").backbone.tokenizer)  # sets nothing around a text
    with pytest.raises(ModelError, match=r"gives no token for the text ''; take the row out"):
        TextEncoder(tokenizer=tokenizer, max_length=8).examples(["w1", ""], None, np.array([0, 1]))
