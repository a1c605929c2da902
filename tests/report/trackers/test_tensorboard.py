"""What TensorBoard reads of a run, by its own reader."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atlas_fl.config import Config
from atlas_fl.events import Event, Note, PhaseStarted, RoundFinished
from atlas_fl.report.trackers import numbers_of, track_run
from tests.report.trackers.test_track_run import ROWS, tracker_of


def round_finished(number: int, *, loss: float) -> RoundFinished:
    return RoundFinished(round=number, rounds=3, scores={}, loss=loss, seconds=1.0, bytes=8, rows=ROWS)


def test_a_run_that_goes_on_is_one_run_and_its_rounds_count_once(tmp_path) -> None:
    told = list[Event]()
    for first, loss in ((1, 0.5), (2, 0.25)):  # killed in round 3, and resumed where its checkpoint is
        with track_run(
            [tracker_of("tensorboard", str(tmp_path / "tb"))], Config(), tmp_path / "one", told.append
        ) as logging:
            for number in range(first, 3):
                logging.tell(PhaseStarted(f"round {number}"))
                logging.tell(round_finished(number, loss=loss))
            if first == 2:
                logging.summary({"overall": {"final": {"test": {"accuracy": 0.625}}}})
    assert not any(isinstance(event, Note) for event in told)
    read = EventAccumulator(str(tmp_path / "tb" / "one"))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    wanted = numbers_of(round_finished(2, loss=0.25))
    assert {name: read.Scalars(name)[-1].value for name in wanted} == wanted
    assert [(one.step, one.value) for one in read.Scalars("summary/overall/final/test/accuracy")] == [(2, 0.625)]
    with track_run(
        [tracker_of("tensorboard", str(tmp_path / "tb"))], Config(), tmp_path / "one", told.append
    ) as logging:
        logging.tell(PhaseStarted("round 1"))  # begun anew
        logging.tell(round_finished(1, loss=0.125))
    again = EventAccumulator(str(tmp_path / "tb" / "one"))
    again.Reload()
    assert [(one.step, one.value) for one in again.Scalars("loss")] == [(1, 0.125)]
    assert b'"seed": 42' in read.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0]
