"""Answers of a finished run's models: those of the frozen model, of a client trained alone, and of the federation.

The frozen model is the federation's without its adapters, so what fine-tuning has changed is seen beside what it was.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias, get_args

import numpy as np

from atlas_fl.client.evaluation import evaluate, write
from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.config import with_values
from atlas_fl.data.chat import to_text
from atlas_fl.data.metrics import rouge
from atlas_fl.data.task import Rows
from atlas_fl.errors import CheckpointError, ConfigError, check_known
from atlas_fl.experiment.choices import find_choices, score_choices
from atlas_fl.experiment.export import check_whole, load_models
from atlas_fl.experiment.judge import VERDICTS, Judge, Verdict
from atlas_fl.frozen import Frozen
from atlas_fl.params import LORA_B, ByClient, Params, head_keys
from atlas_fl.setup.assembly import Assembly, assemble, encoders, max_sequence_length, recorded_config
from atlas_fl.storage import folder_access, jsonl
from atlas_fl.storage.run_folder import RunFolder, find_run

Kind: TypeAlias = Literal["base", "alone", "federated"]
"""The frozen model, the one that a client has trained alone (`--alone`), and the one that the run gave it."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class Answer(Frozen):
    """A prompt of a client's own, and the answers of its models by kind."""

    client: str
    prompt: str
    reference: str
    answers: dict[Kind, str]
    verdict: Verdict | None = None
    """The better one of base and federated by a judge model (`experiment.judge`); None where none was asked."""


class Evaluation(Frozen):
    """Scores and answers of a run's models on one split."""

    split: str
    scores: dict[str, dict[Kind, dict[str, float]]]
    """By client and kind."""
    answers: list[Answer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def clients(self, kind: Kind) -> int:
        """Number of clients that have a model of this kind."""
        return sum(kind in kinds for kinds in self.scores.values())

    def mean(self, kind: Kind, metric: str) -> float | None:
        """The mean score over the clients that have it; None where nobody does."""
        values = [kinds[kind][metric] for kinds in self.scores.values() if metric in kinds.get(kind, {})]
        return fmean(values) if values else None


def evaluate_run(
    run: str | Path,
    *,
    split: Literal["validation", "test"] = "test",
    clients: Sequence[str] = (),
    answers: int | None = None,
    new_tokens: int | None = None,
    choices: Sequence[str] = (),
) -> Evaluation:
    """Score every kind of model of these clients, all by default, on their own rows; write it into the run's folder.

    `answers` and `new_tokens` stand in for the run's --rouge-examples and --new-tokens, `choices` for those of the rows
    (`experiment.choices`).

    Raises:
        ConfigError: the run has no such client, or no row is answered by one of the choices.
        CheckpointError: it has no checkpoint, or a client's model is at its site alone.
    """
    folder = find_run(run)
    config = recorded_config(folder)
    values = {"rouge_examples": answers, "new_tokens": new_tokens}
    config = with_values(config, {name: value for name, value in values.items() if value is not None})
    models = _models_by_kind(folder, clients)
    assembly = assemble(config)
    site = assembly.site
    offered = {
        client.name: find_choices(client, split, given=choices, site=site, config=config.data)
        for client in assembly.clients
        if client.name in models["federated"]
    }
    rows = [choice for choice in offered.values() if choice is not None]
    if choices and not rows:
        raise ConfigError(
            f"no {split} row is answered by one of --choices {' '.join(choices)}; name two or more answers as they"
            " stand in the data, or take --choices answers for all that a client was trained on"
        )
    left_out = sum(choice.left_out for choice in rows)
    notes = [f"choice: without {left_out} rows whose answer is none of the choices"] if left_out else []
    found = Evaluation(split=split, scores={}, notes=notes)
    for name in models["federated"]:
        own = {kind: of_kind[name] for kind, of_kind in models.items() if name in of_kind}
        scores: dict[Kind, dict[str, float]] = {}
        written: dict[Kind, list[str]] = {}
        for kind, params in own.items():
            options = EvaluateOptions(split=split, prior_correction=config.training.prior_correction)
            (update,) = evaluate([Job(client=name, params=params, round=0, options=options)], site)
            scores[kind] = {key: value for key, value in update.metrics.items() if key != "seconds"}
            prompts = site.data[name].prompts.get(split)
            if prompts is not None:
                written[kind] = write(prompts.encoded, params, site, new_tokens=config.data.new_tokens)
                scores[kind] |= rouge(prompts.references, written[kind])
            if (choice := offered[name]) is not None:
                scores[kind] |= score_choices(choice, params, client=name, site=site)
        found.scores[name] = {kind: jsonl.drop_undefined(values) for kind, values in scores.items()}
        found.answers.extend(_side_by_side(assembly, name, written, split=split))
    _write_evaluation(folder, found)
    return found


def judge_run(run: str | Path, judge: Judge) -> Evaluation:
    """Have a judge compare the kept answers of base and federation, and write its verdicts beside them.

    What was judged before an error is written too.

    Raises:
        ConfigError: no answers of both are kept, or the judge does not answer.
    """
    folder = find_run(run)
    found = read_evaluation(folder)
    if found is None or not any(map(_is_comparable, found.answers)):
        raise ConfigError(f"{folder.path} keeps no answers of both base and federation; evaluate it with --answers 8")
    answers = list(found.answers)
    try:
        for place, answer in enumerate(found.answers):
            if _is_comparable(answer):
                base, federated = answer.answers["base"], answer.answers["federated"]
                verdict = judge.compare(answer.prompt, answer.reference, base=base, federated=federated)
                answers[place] = replace(answer, verdict=verdict)
    finally:
        verdicts = Counter(answer.verdict for answer in answers)
        told = ", ".join(f"{verdict} {verdicts[verdict]}" for verdict in VERDICTS)
        note = f"judge {judge.model}, better one in both orders: {told}"
        found = replace(found, answers=answers, notes=[*found.notes, note])
        _write_evaluation(folder, found)
    return found


def _is_comparable(answer: Answer) -> bool:
    return {"base", "federated"} <= answer.answers.keys()


def _write_evaluation(folder: RunFolder, found: Evaluation) -> None:
    lines = (json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in found.answers)
    folder_access.write_atomic(folder.answers, "".join(lines).encode())
    content = {"split": found.split, "clients": found.scores, "notes": found.notes}
    folder_access.write_atomic(folder.evaluation, jsonl.encode_json(content))


def read_evaluation(folder: RunFolder) -> Evaluation | None:
    """The scores and answers in a run's folder; None where it has not been evaluated.

    Raises:
        CheckpointError: a file is damaged.
    """
    if not folder.evaluation.is_file():
        return None
    content = jsonl.read_json(folder.evaluation, within=folder.path)
    try:
        answers = [Answer(**row) for row in jsonl.read_rows(folder.answers)]
        return Evaluation(
            split=content["split"], scores=content["clients"], answers=answers, notes=content.get("notes", [])
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"damaged file {folder.evaluation} or {folder.answers.name}: {error}; evaluate the run again with"
            " `atlas evaluate`"
        ) from None


def generate(
    run: str | Path,
    text: str,
    *,
    client: str,
    kind: Kind = "federated",
    new_tokens: int = 64,
    system: str | None = None,
) -> str:
    """The answer of a client's model to this text, in the chat template where its task has conversations.

    Raises:
        ConfigError: the run has no such client, or its task writes no text, or has no conversations for `system`.
        CheckpointError: the run has no model of this kind.
    """
    folder = find_run(run)
    config = recorded_config(folder)
    models = _models_by_kind(folder, [client])
    if client not in models.get(kind, {}):
        raise CheckpointError(
            f"run {folder.path} has no model of the kind {kind} for {client}; it has {', '.join(models)}"
        )
    assembly = assemble(config)
    (task,) = (one.task for one in assembly.clients if one.name == client)
    if not task.writes:
        raise ConfigError(
            f"task {task.name} of {client} has labels and writes no text; `atlas evaluate` has its scores"
        )
    if system is not None and not task.chat:
        raise ConfigError(f"--system is for conversations, and task {task.name} of {client} has none; leave it out")
    said = {"system": system, "user": text, "assistant": ""}
    turns = [{"role": role, "content": content} for role, content in said.items() if content is not None]
    rows = Rows(text=(to_text(turns) if task.chat else text,), pair=("",), label=np.zeros(1, np.float32))
    site = assembly.site
    _, encode_prompt = encoders(task, site.backbone)
    room = max_sequence_length(site.backbone) - new_tokens
    prompt = encode_prompt(rows, max(1, room))
    if room < 1 or prompt.full_lengths is not None:
        raise ConfigError(
            f"the text does not fit into {site.backbone.name} with an answer of --new-tokens {new_tokens}: they have"
            f" {max_sequence_length(site.backbone)} tokens together; shorten it, or lower --new-tokens"
        )
    (written,) = write(prompt, models[kind][client], site, new_tokens=new_tokens)
    return written


def _models_by_kind(folder: RunFolder, clients: Sequence[str]) -> dict[Kind, ByClient]:
    """The models of these clients, all where none is named, by kind; the kinds that there are."""
    models = load_models(folder)
    check_known("client", *clients, among=models)
    chosen = {name: params for name, params in models.items() if not clients or name in clients}
    check_whole(chosen)
    found: dict[Kind, ByClient] = {}
    base = {name: _without_adapters(params) for name, params in chosen.items() if not head_keys(params)}
    if base and all(any(key.endswith(LORA_B) for key in params) for params in base.values()):
        found["base"] = base
    alone = RunFolder(folder.alone)
    if alone.is_run():
        found["alone"] = {name: params for name, params in load_models(alone).items() if name in chosen}
    return {**found, "federated": chosen}


def _without_adapters(params: Params) -> Params:
    return {key: tensor.new_zeros(tensor.shape) if key.endswith(LORA_B) else tensor for key, tensor in params.items()}


def _side_by_side(
    assembly: Assembly, client: str, written: dict[Kind, list[str]], *, split: Literal["validation", "test"]
) -> Iterator[Answer]:
    if not written:
        return
    prompts, tokenizer = assembly.site.data[client].prompts[split], assembly.site.backbone.tokenizer
    ends = prompts.encoded.offsets
    for place, reference in enumerate(prompts.references):
        prompt = tokenizer.decode(prompts.encoded.ids[ends[place] : ends[place + 1]])
        answers = {kind: texts[place] for kind, texts in written.items()}
        yield Answer(client=client, prompt=prompt, reference=reference, answers=answers)
