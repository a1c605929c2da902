import numpy as np

from atlas_fl.models.tokens import Encoded, encode

THREE = Encoded(
    ids=np.array([1, 2, 3, 4, 5, 6]),
    types=np.array([0, 0, 1, 0, 0, 1]),
    offsets=np.array([0, 3, 4, 6]),
    labels=np.array([7, 8, 9]),
)


def test_taking_examples_by_hand() -> None:
    taken = THREE.take(np.array([2, 0, 2]))
    assert taken.ids.tolist() == [5, 6, 1, 2, 3, 5, 6]
    assert taken.types.tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert taken.offsets.tolist() == [0, 2, 5, 7]
    assert taken.labels.tolist() == [9, 7, 9]
    assert (len(THREE), THREE.lengths.tolist()) == (3, [3, 1, 2])


def test_taking_nothing_gives_nothing() -> None:
    none = THREE.take(np.array([], dtype=np.int64))
    assert (len(none), none.ids.tolist(), none.offsets.tolist()) == (0, [], [0])


def test_encoding_gives_the_tokenizers_own_tokens_cut_to_length(tiny) -> None:
    tokenizer = tiny.backbone.tokenizer
    text, pair = ["w1 w2 w3", "w4"], ["w5", "w6 w7 w8 w9 w10 w11 w12"]
    encoded = encode(text, pair, np.array([0, 1]), tokenizer=tokenizer, max_length=8)
    for i in range(2):
        alone = tokenizer(text[i], pair[i], truncation=True, max_length=8, return_token_type_ids=True)
        part = encoded.take(np.array([i]))
        assert part.ids.tolist() == alone["input_ids"]
        assert part.types.tolist() == alone["token_type_ids"]
    assert encoded.lengths.max() == 8


def test_single_texts_need_no_pair(tiny_of) -> None:
    tiny = tiny_of("bert")
    encoded = encode(["w1", "w2 w3"], None, np.array([0, 1]), tokenizer=tiny.backbone.tokenizer, max_length=8)
    assert encoded.lengths.tolist() == [3, 4]
    assert not encoded.types.any()
