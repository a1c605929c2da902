import contextlib
import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.transport.frames import HEAD_LIMIT, decode_frame, encode_frame

HEAD = {"kind": "result", "job": 3, "metrics": ["loss"], "text": "ü"}
TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1, -2], dtype=torch.int8),
    "c": torch.tensor([True, False]),
    "d": torch.tensor(1.5, dtype=torch.bfloat16),
    "e": torch.zeros(0, 4),
}


def test_a_frame_gives_back_what_went_in() -> None:
    head, tensors = decode_frame(encode_frame(HEAD, TENSORS))
    assert head == HEAD
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert decode_frame(encode_frame({}, {})) == ({}, {})


def test_tensors_are_read_as_safetensors_reads_them() -> None:
    frame = encode_frame(HEAD, TENSORS)
    payload = frame[24 + int.from_bytes(frame[8:16], "little") :]
    expected, found = load(payload), decode_frame(frame)[1]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_header_by_hand() -> None:
    frame = encode_frame({"a": 1}, {})
    assert frame == b"ATLS" + bytes([1, 0, 0, 0]) + (8).to_bytes(8, "little") + bytes(8) + b'{"a": 1}'


def hostile(frame: bytes, draw: random.Random) -> bytes:
    """A frame with a few bytes changed, a piece cut out or put in twice, or nothing but noise."""
    changed = bytearray(frame)
    match draw.randrange(5):
        case 0:
            return draw.randbytes(draw.randrange(200))
        case 1:
            for _ in range(draw.randrange(1, 6)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        case 2:
            start = draw.randrange(len(changed))
            del changed[start : start + draw.randrange(1, 40)]
        case 3:
            start = draw.randrange(len(changed))
            changed[start:start] = changed[start : start + draw.randrange(1, 40)]
        case _:  # lengths, which a reader would believe first
            place = draw.choice([8, 16, 24 + int.from_bytes(frame[8:16], "little")])
            changed[place : place + 8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**63, draw.randrange(2**64)]))
    return bytes(changed)


@contextlib.contextmanager
def at_most(size: int) -> Iterator[None]:
    """A block that never holds more bytes of new memory than these."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_ten_thousand_hostile_frames_crash_nothing_and_take_no_memory() -> None:
    draw, frame, refused = random.Random(0), encode_frame(HEAD, TENSORS), 0
    with at_most(4 * 2**20):
        for _ in range(10_000):
            try:
                decode_frame(hostile(frame, draw))
            except ProtocolError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 8_000


def with_tensors(listed: str, data: bytes = b"") -> bytes:
    text = listed.encode() + b" " * (-len(listed) % 8)
    body = len(text).to_bytes(8, "little") + text + data
    return b"ATLS" + bytes([1, 0, 0, 0]) + struct.pack("<QQ", 8, len(body)) + b"{}      " + body


def with_one(dtype: str, shape: str, offsets: str, data: bytes = b"") -> bytes:
    return with_tensors(f'{{"x":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}}}', data)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "a frame of 0 bytes; allowed: 24 to"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "is this an ATLAS end"),
        (b"ATLS" + bytes([2]) + bytes(19), "a frame of version 2; this end speaks version 1"),
        (encode_frame(HEAD, TENSORS)[:-1], "says that it holds"),
        (b"ATLS" + bytes([1, 0, 0, 0]) + struct.pack("<QQ", 2**63, 0), "says that it holds"),
        (encode_frame({"a": 1}, {}).replace(b'{"a": 1}', b'["a", 1]'), "a frame's head is a list"),
        (encode_frame({"a": 1}, {}).replace(b'{"a": 1}', b'{"a":NaN'), "no strict JSON"),
        (with_one("F32", "1000000000000", "0,4000000000000"), "has the shape"),
        (with_one("F32", "0,4611686018427387904,8", "0,0"), "has the shape"),
        (with_one("F8_E4M3", "1", "0,1", b"\0"), "is F8_E4M3; allowed: I64, F64"),
        (with_one("BOOL", "1", "0,1", b"\7"), "neither 0 nor 1"),
        (with_one("F32", "2", "0,4", bytes(8)), "takes not 4 bytes"),
        (with_one("F32", "1", "4,8", bytes(8)), "there is a gap"),
        (with_one("F32", "1", "0,4", bytes(8)), "belong to no tensor"),
        (with_one("F32", "1", "0,true", bytes(4)), "has the shape"),
        (with_tensors('{"x":{"dtype":"F32","shape":[0,9,9],"data_offsets":[0,0]},"y":3}'), "is None; allowed"),
        (with_one("F32", "0" + 9 * ",60", "0,0"), "not 0"),
        (b"ATLS" + bytes([1, 0, 0, 0]) + struct.pack("<QQ", 100_000, 0) + b"[" * 100_000, "no strict JSON"),
        (with_tensors("[]"), "a frame's list of tensors is a list"),
        (with_tensors(" " * (HEAD_LIMIT + 8)), "list of tensors has"),
    ],
)
def test_what_is_wrong_is_told(frame: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_frame(frame)


def test_nothing_is_sent_that_would_be_refused() -> None:
    with pytest.raises(ProtocolError, match=r"a message of .* allowed: 100 and"):
        encode_frame({}, {"x": torch.zeros(100)}, limit=100)
    with pytest.raises(ProtocolError, match="its head; allowed"):
        encode_frame({"x": "y" * HEAD_LIMIT}, {})
    with pytest.raises(ProtocolError, match="no strict JSON"):
        encode_frame({"x": float("nan")}, {})
    with pytest.raises(ProtocolError, match=r"a frame of .* bytes; allowed: 24 to 100"):
        decode_frame(encode_frame({}, {"x": torch.zeros(100)}), limit=100)
