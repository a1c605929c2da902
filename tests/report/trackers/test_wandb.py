"""What Weights & Biases is told of a run, read back from the file that it keeps offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config
from atlas_fl.events import Event, Note, PhaseStarted, RoundFinished
from atlas_fl.report.trackers import numbers_of, track_run
from tests.report.trackers.test_track_run import ROWS, tracker_of


def records(file: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format after seven bytes, a protobuf message each."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # no head fits into the rest of a block
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def items(parts: Any) -> dict[str, Any]:
    return {part.key or "/".join(part.nested_key): json.loads(part.value_json) for part in parts}


def test_what_is_logged_offline_is_what_the_rounds_brought(monkeypatch, tmp_path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    summary, found = {"overall": {"final": {"test": {"accuracy": 0.625}}}}, []
    for number in (1, 2):  # two sessions of one run
        told = list[Event]()
        with track_run([tracker_of("wandb", "federations")], Config(), tmp_path, told.append) as logging:
            logging.tell(PhaseStarted(f"round {number}"))
            logging.tell(RoundFinished(round=number, rounds=2, scores={}, loss=0.5, seconds=1.0, bytes=8, rows=ROWS))
            if number == 2:
                logging.summary(summary)
        assert not any(isinstance(event, Note) for event in told)
        (file,) = set(tmp_path.glob("wandb/offline-run-*/run-*.wandb")) - {own for own, _ in found}
        found.append((file, list(records(file))))
    for number, (_, read) in enumerate(found, 1):
        (begun,) = [one.run for one in read if one.HasField("run")][:1]
        assert begun.project == "federations" and begun.display_name == tmp_path.name
        assert items(begun.config.update)["seed"] == 42
        (logged,) = [items(one.history.item) for one in read if one.HasField("history")]
        wanted = numbers_of(RoundFinished(round=number, rounds=2, scores={}, loss=0.5, seconds=1.0, bytes=8, rows=ROWS))
        assert {key: logged[key] for key in wanted} == wanted and logged["_step"] == number
    assert len({file.name for file, _ in found}) == 1, "one run there too"
    updates = [items(one.summary.update) for _, read in found for one in read if one.HasField("summary")]
    assert any("0.625" in json.dumps(update) for update in updates if any("summary" in key for key in update))
