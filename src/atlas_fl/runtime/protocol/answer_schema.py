"""Schemas of clients' answers by action: metrics in their ranges, tensors in their shapes, numbers of examples.

An answer that can be read is not yet one that fits its job: planning, mixing and records go by names and shapes. So the
server checks each where it arrives, and refuses what does not fit, from that client alone (`SCHEMAS`).

The tensors of a training answer are checked where they would meet those of others (`aggregation.update_checks`), those
of a second model, which meet none, here.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

import torch

from atlas_fl.aggregation.update_checks import check_update
from atlas_fl.client.calibration import CROSS, GRAM, LOSSES, SCALES, WEIGHT
from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.importance import IMPORTANCE
from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import TrainOptions
from atlas_fl.data.metrics import CHANCE, FURTHER_METRICS
from atlas_fl.errors import ProtocolError, first_of, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.methods.fedpac import LARGEST_FEATURE
from atlas_fl.methods.method import ReportTensor
from atlas_fl.methods.registry import reporting
from atlas_fl.params import Params
from atlas_fl.partial_sharing import expected_update
from atlas_fl.runtime.protocol.client_metadata import ClientMetadata

LARGEST_SCORE = 1e299
"""Largest perplexity or score of a plug-in: a mean over clients is a number still."""
LARGEST_WEIGHT = 1e6
"""Largest weight of a model that a client has warmed up, or trained on half of its examples; others are below one."""
LARGEST_SUM = 1e30
"""Largest of a client's sums, so that those of all clients are finite in float32."""
_ROUNDING = 1e-6


class Range(Frozen):
    """The values that a metric can have, with some room for rounding."""

    least: float = 0.0
    most: float
    may_be_undefined: bool = False
    """NaN and infinity are allowed: rows leave them out."""

    def holds(self, value: float) -> bool:
        """Return whether this value is one of them."""
        if not math.isfinite(value):
            return self.may_be_undefined
        below, above = (_ROUNDING * max(1.0, abs(bound)) for bound in (self.least, self.most))
        return self.least - below <= value <= self.most + above


SHARE = Range(most=1.0)
CORRELATION = Range(least=-1.0, most=1.0)
STEPS = SECONDS = Range(most=1e9)
FLOAT32_LOSS = Range(most=float(torch.finfo(torch.float32).max))
"""Losses in training are of float32."""
SCORED_LOSS = Range(most=1e78, may_be_undefined=True)
"""The square of a float32 at most; a model that others have spoilt may have none, which is no fault of its client."""
CALIBRATION = Range(most=1.0, may_be_undefined=True)
"""Calibration error; it is undefined where the loss is."""
PERPLEXITY = Range(least=1.0, most=LARGEST_SCORE, may_be_undefined=True)
ANY_SCORE = Range(least=-LARGEST_SCORE, most=LARGEST_SCORE)

Ranges = Mapping[str, Range]
CLASS_SCORES = dict.fromkeys(("accuracy", "f1", "macro_f1", "balanced_accuracy", "precision", "recall"), SHARE)
SCORES: Mapping[str, Ranges] = {
    "classes": {"loss": SCORED_LOSS, "ece": CALIBRATION, **CLASS_SCORES, "mcc": CORRELATION, "primary": CORRELATION},
    "labels": {"loss": SCORED_LOSS, **dict.fromkeys(("accuracy", "micro_f1", "macro_f1", "primary"), SHARE)},
    "values": {"loss": SCORED_LOSS, "primary": CORRELATION},
    "text": {"loss": SCORED_LOSS, "perplexity": PERPLEXITY, "accuracy": SHARE, "primary": SHARE},
}
"""Scores that every model has, by the kind of a task's labels (`data.metrics`)."""
CORRELATIONS: Ranges = {"pearson": CORRELATION, "spearman": CORRELATION}
PREFERRED: Ranges = {"preferred": SHARE}
"""Score only where clients learn preferences."""
ROUGE: Ranges = {"rouge1": SHARE, "rouge2": SHARE, "rougeL": SHARE, "exact_match": SHARE}
"""Scores only where clients write text, and only in a round that asks for it."""


class AnsweredRequest(Frozen):
    """The job that an answer is to, as the server knows it."""

    action: str
    job: Job
    """The job of the whole client, cut or not."""
    metadata: ClientMetadata
    num_layers: int | None
    """Blocks of the backbone; None where models are whole, which are measured by weight."""


class ExpectedAnswer(Frozen):
    """Metrics, examples and tensors of the answer to one job."""

    metrics: Ranges = field(default_factory=dict)
    optional: Ranges = field(default_factory=dict)
    """Metrics that may be there as well."""
    examples: int = 0
    tensors: Mapping[str, ReportTensor] | None = None
    """None where they are the model's own and checked elsewhere, or as they were sent."""
    keeps_model: bool = False
    """The answer brings no tensors."""


def check_answer(request: AnsweredRequest, update: Update) -> None:
    """Raise `ProtocolError` unless this update can be an answer to this request."""
    expected = SCHEMAS[request.action](request)
    metrics = update.metrics
    required = expected.metrics
    if missing := [name for name in required if name not in metrics]:
        raise ProtocolError(f"it lacks the metrics {', '.join(missing)}; allowed: {', '.join(required)}")
    ranges = {**required, **expected.optional}
    for name, value in metrics.items():
        if name not in ranges:
            raise ProtocolError(f"it has a metric {short_repr(name)}; allowed: {', '.join(ranges) or 'none'}")
        if not ranges[name].holds(value):
            raise ProtocolError(f"{name} is {value:g}; allowed: {ranges[name].least:g} to {ranges[name].most:g}")
    if update.examples != expected.examples:
        raise ProtocolError(
            f"it answers on {update.examples} examples; allowed: the {expected.examples} that were registered"
        )
    _check_loaded(request, update)
    if expected.keeps_model and update.params is not request.job.params:
        raise ProtocolError(f"it brings tensors ({_first(update.params)}); allowed: none with {request.action}")
    if expected.tensors is not None:
        check_tensors(update.params, expected.tensors)
    _check_classes(request, update)
    _check_report(request, update)
    if request.action in _VALUE_CHECKS:
        _VALUE_CHECKS[request.action](request, update)


def _check_loaded(request: AnsweredRequest, update: Update) -> None:
    """Raise `ProtocolError` unless the digest of the loaded model is there where it is asked for, and there alone."""
    is_due = request.action == "train" and request.job.options.hash_loaded
    if (update.loaded is not None) is not is_due:
        raise ProtocolError(
            f"it says that it loaded {short_repr(update.loaded)}; allowed: {'a SHA-256' if is_due else 'nothing'}"
        )
    if update.keys > len(request.job.params):
        raise ProtocolError(f"it says that it loaded {update.keys} tensors; allowed: 0 to {len(request.job.params)}")


def check_tensors(params: Params, schemas: Mapping[str, ReportTensor]) -> None:
    """Raise `ProtocolError` unless these are all of these tensors and no others, each of its shape, type and range."""
    if missing := [name for name in schemas if name not in params]:
        raise ProtocolError(f"it lacks {_first(missing)}; allowed: {len(schemas)} tensors")
    if extra := [name for name in params if name not in schemas]:
        raise ProtocolError(f"it has unknown {_first(extra)}; allowed: {len(schemas)} tensors")
    for name, schema in schemas.items():
        tensor = params[name]
        if tuple(tensor.shape) != schema.shape or tensor.dtype != schema.dtype:
            raise ProtocolError(
                f"{short_repr(name)} is {tuple(tensor.shape)} {tensor.dtype}; allowed: {schema.shape} {schema.dtype}"
            )
        if not tensor.numel() or not tensor.is_floating_point():
            continue
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        # NaN is in no range
        if not (schema.least <= low and high <= schema.most):
            raise ProtocolError(
                f"{short_repr(name)} holds values from {low:g} to {high:g}; allowed: {schema.least:g} to"
                f" {schema.most:g}"
            )


def _check_classes(request: AnsweredRequest, update: Update) -> None:
    """Raise `ProtocolError` unless counts by class are of tests with classes alone, as they were registered."""
    job, metadata = request.job, request.metadata
    counted = request.action == "evaluate" and metadata.num_labels > 1 and job.options.split == "test"
    if bool(update.classes) is not counted:
        raise ProtocolError(f"it {'lacks' if counted else 'has'} counts by class; allowed: those of tests alone")
    if counted and list(update.classes["examples"]) != list(metadata.labels["test"]):
        raise ProtocolError("its examples by class are others than were registered; join with the data of the plan")
    if counted and not metadata.multilabel and sum(update.classes["predicted"]) > update.examples:
        raise ProtocolError("it takes an example for two classes; allowed: one, or none where outputs are no numbers")


def _check_report(request: AnsweredRequest, update: Update) -> None:
    """Raise `ProtocolError` unless the tensors beside the model are those that the job asked for."""
    options = request.job.options
    report = options.report if isinstance(options, TrainOptions) else "none"
    try:
        if others := sorted(update.reported.keys() - {report}):
            raise ProtocolError(f"it has unknown {_first(others)}")
        if report == "none":
            return
        method = reporting(report)
        classes = request.metadata.num_labels
        if method.needs_classes and (classes < 2 or request.metadata.multilabel):
            raise ProtocolError(f"task {request.metadata.task} has no classes; join with a task that has some")
        reported = update.reported.get(report, {})
        check_tensors(reported, method.report_tensors(request.job.params, classes=classes))
        counts = [int(count) for count in request.metadata.labels["train"]] if classes > 1 else []
        if fault := method.report_fault(reported, counts=counts):
            raise ProtocolError(fault)
    except ProtocolError as error:
        raise ProtocolError(f"its report ({report}): {error}") from None


def _first(names: Iterable[str]) -> str:
    return first_of([short_repr(name) for name in names], most=3)


def _scores(request: AnsweredRequest) -> ExpectedAnswer:
    """Scores of a model; a correlation with a constant is undefined, as those of plug-ins may be."""
    options = request.job.options
    num_labels = request.metadata.num_labels
    kind = "classes" if num_labels > 1 else "values" if num_labels == 1 else "text"
    kind = "labels" if request.metadata.multilabel else kind
    optional: Ranges = dict.fromkeys(FURTHER_METRICS, ANY_SCORE)
    if kind in ("classes", "labels"):
        optional = {"auroc": SHARE, **optional}
    elif kind == "values":
        optional = {**CORRELATIONS, **optional}
    elif kind == "text":
        optional = {**PREFERRED, **(ROUGE if options.new_tokens and request.job.cut is None else {})}
    return ExpectedAnswer(
        metrics={**SCORES[kind], "seconds": SECONDS},
        optional=optional,
        examples=request.metadata.examples[options.split],
        keeps_model=True,
    )


def _check_primary(request: AnsweredRequest, update: Update) -> None:
    """Raise `ProtocolError` unless the primary score is that of the task's metric, or of chance if it is undefined."""
    metric = request.metadata.metric
    metrics = update.metrics
    allowed = metrics.get(metric, CHANCE.get(metric, 0.0))
    if metrics["primary"] != allowed:
        raise ProtocolError(f"primary is {metrics['primary']:g}; allowed: its {metric}, {allowed:g}")


def _training(request: AnsweredRequest) -> ExpectedAnswer:
    """A trained model, on as many examples as a client with these options trains on."""
    options = request.job.options
    every = request.metadata.examples["train"]
    count = every if options.half is None else len(range(options.half, every, 2))
    private: Ranges = {}
    if options.dp == "example":
        private = {"loss": SCORED_LOSS, **dict.fromkeys(("epsilon", "noise_multiplier", "paid_steps"), STEPS)}
    return ExpectedAnswer(
        metrics={"loss": FLOAT32_LOSS, "seconds": SECONDS, "steps": STEPS, **private},
        optional={"skipped": STEPS, "head_steps": STEPS, "extra_steps": STEPS},
        examples=count if options.most is None else min(count, options.most),
    )


def _check_second(request: AnsweredRequest, update: Update) -> None:
    """Raise `ProtocolError` for a second model that has another form than the job's, or the name of one."""
    if request.job.options.second_model not in ("none", "frozen"):
        check_update(expected_update(request.job.params, update.params, ()), update.params)


def _fingerprint(request: AnsweredRequest) -> ExpectedAnswer:
    sketch = ReportTensor(shape=(request.job.options.sketch_dim,))
    # whole models are not warmed up, so none comes back with its fingerprint
    model = request.job.params if request.num_layers is not None else {}
    tensors = {key: _like(tensor, least=-LARGEST_WEIGHT, most=LARGEST_WEIGHT) for key, tensor in model.items()}
    return ExpectedAnswer(
        metrics={"agreement": CORRELATION, "steps": STEPS, "loss": FLOAT32_LOSS},
        tensors={**tensors, FIRST: sketch, SECOND: sketch},
    )


def _like(tensor: torch.Tensor, *, least: float, most: float) -> ReportTensor:
    """A tensor of this shape and type."""
    return ReportTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, least=least, most=most)


def _check_sketches(_: AnsweredRequest, update: Update) -> None:
    for name in (FIRST, SECOND):
        length = float(torch.linalg.vector_norm(update.params[name].double()))
        if abs(length - 1) > 1e-3:
            raise ProtocolError(f"{name} has length {length:g}; allowed: 1")


def _importance(request: AnsweredRequest) -> ExpectedAnswer:
    assert request.num_layers is not None, "only models with adapters are measured by layer"
    shares = ReportTensor(shape=(request.num_layers,), dtype=torch.float64, least=0.0, most=1.0 + _ROUNDING)
    return ExpectedAnswer(tensors={IMPORTANCE: shares})


def _check_importance(_: AnsweredRequest, update: Update) -> None:
    total = float(update.params[IMPORTANCE].sum())
    if abs(total - 1) > _ROUNDING:
        raise ProtocolError(f"importance sums to {total:g}; allowed: 1")


def _ridge(request: AnsweredRequest) -> ExpectedAnswer:
    classes, features = request.job.params[WEIGHT].shape
    examples = request.metadata.examples["train"]
    most = examples * LARGEST_FEATURE**2
    shapes = {GRAM: (features + 1, features + 1), CROSS: (features + 1, classes)}
    tensors = {
        name: ReportTensor(shape=shape, dtype=torch.float64, least=-most, most=most) for name, shape in shapes.items()
    }
    return ExpectedAnswer(examples=examples, tensors=tensors)


def _check_ridge(request: AnsweredRequest, update: Update) -> None:
    """Raise `ProtocolError` unless X^T X is symmetric, positive semidefinite, and its last number that of examples."""
    gram = update.params[GRAM]
    count = request.metadata.examples["train"]
    scale = float(gram.diagonal().abs().max())
    lifted = gram + torch.eye(len(gram), dtype=gram.dtype) * (scale * len(gram) * 1e-9)
    _, failed = torch.linalg.cholesky_ex(lifted)
    if gram[-1, -1] != count or not torch.allclose(gram, gram.T, rtol=0, atol=1e-9 * scale) or int(failed):
        raise ProtocolError(f"{GRAM} is no sum of products of {count} examples' features; install the server's version")


def _scale(request: AnsweredRequest) -> ExpectedAnswer:
    losses = ReportTensor(shape=(len(SCALES),), dtype=torch.float64, least=0.0, most=LARGEST_SUM**2)
    examples = min(request.job.options.examples, request.metadata.examples["validation"])
    return ExpectedAnswer(examples=examples, tensors={LOSSES: losses})


def _sensitivity(request: AnsweredRequest) -> ExpectedAnswer:
    job = request.job
    return ExpectedAnswer(
        examples=min(job.options.examples, request.metadata.examples["train"]),
        tensors={name: _like(job.params[name], least=0.0, most=LARGEST_SUM) for name in job.options.names},
    )


SCHEMAS: Mapping[str, Callable[[AnsweredRequest], ExpectedAnswer]] = {
    "fingerprint": _fingerprint,
    "importance": _importance,
    "train": _training,
    "evaluate": _scores,
    "ridge": _ridge,
    "scale": _scale,
    "sensitivity": _sensitivity,
}
"""Every action that a client can be asked for, of adapters and of whole models."""
_VALUE_CHECKS: Mapping[str, Callable[[AnsweredRequest, Update], None]] = {
    "train": _check_second,
    "fingerprint": _check_sketches,
    "importance": _check_importance,
    "evaluate": _check_primary,
    "ridge": _check_ridge,
}
"""Checks of an answer's numbers against each other."""
