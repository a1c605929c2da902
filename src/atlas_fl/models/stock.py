"""The stock path: any architecture that transformers loads and PEFT adapts, in padded batches, client after client.

The model is the whole stock one. Its last layer, which gives the logits of classes, is an identity, so that its output
is what a client's own last layer reads. What a stock head has below it is a part of the client's head too and stands in
for the model's own tensors of these names (`PARTS`). A model that writes keeps its output embedding, and its output is
the logits of the tokens to be written.
"""

from collections.abc import Collection, Sequence
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.pytorch_utils import Conv1D

from atlas_fl.errors import ModelError
from atlas_fl.models.backbone import Backbone, pad_left
from atlas_fl.models.registry import Dense, Family

NOTE = "ran through the stock path: padded, one client after another"
"""Note of a plan whose architecture has no packs."""


def auto_class(config: Any, *, writes: bool) -> Any:
    """The class of transformers for this config: of images, of text to write, or of classes."""
    kinds: list[Any] = [transformers.AutoModelForSequenceClassification, transformers.AutoModelForImageClassification]
    if writes:
        kinds = [transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM]
        if not config.is_encoder_decoder and type(config) in transformers.AutoModelForMaskedLM._model_mapping:
            raise ModelError(
                f"the architecture {config.model_type!r} reads both ways and cannot write text, as a task with target="
                " asks; choose a model that writes, such as --model gpt2"
            )
    for auto in kinds:
        if type(config) in auto._model_mapping:
            return auto
    raise ModelError(
        f"transformers has no {' or '.join(auto.__name__ for auto in kinds)} of the architecture"
        f" {config.model_type!r}; choose a model of another one"
    )


def stock_family(name: str, config: Any, *, writes: bool = False) -> Family:
    """The family of any architecture, from an outline of its model without weights.

    Raises `ModelError` where it has no list of blocks, or no last layer.
    """
    auto = auto_class(config, writes=writes)
    with torch.device("meta"):
        model: transformers.PreTrainedModel = auto.from_config(config, trust_remote_code=False)
    images = auto is transformers.AutoModelForImageClassification
    last, parts = ("", dict[str, tuple[int, ...]]()) if writes else head_of(name, model)
    inside = "" if model.base_model is model else f"{model.base_model_prefix}."
    first, *others = block_lists(name, model)
    inner = (module for path in (first, *others) for module in model.get_submodule(path).modules())
    if not any(isinstance(module, nn.Linear | Conv1D) for module in inner):
        raise ModelError(
            f"model {name!r} ({config.model_type}) has no linear layer in its blocks, and adapters stand on no other;"
            " choose another model, or --tune whole where it sees images"
        )
    if images:  # its backbone is the headless model, and the rest of its head is frozen
        first, others, parts = first.removeprefix(inside), [path.removeprefix(inside) for path in others], {}
    return Family(
        model_type=str(config.model_type),
        prefix=inside.removesuffix(".") if images else "",
        blocks=first,
        more_blocks=tuple(others),
        pool="last" if writes else "first",
        head=(Dense(name=last, bias=bool(last) and model.get_submodule(last).bias is not None),),
        parts=parts,
        conv1d=any(isinstance(module, Conv1D) for module in model.modules()),
        stem=(),
        images=images,
        width=model.get_submodule(last).in_features if last else int(config.get_text_config().hidden_size),
        stock=True,
        seq2seq=auto is transformers.AutoModelForSeq2SeqLM,
    )


def head_of(name: str, model: transformers.PreTrainedModel) -> tuple[str, dict[str, tuple[int, ...]]]:
    """(name of the layer that gives the logits, shapes of the tensors between it and the headless model)."""
    inside = f"{model.base_model_prefix}."
    outputs = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not path.startswith(inside)
        and module.out_features == model.config.num_labels
    ]
    if len(outputs) != 1:
        raise ModelError(
            f"model {name!r} has {len(outputs) or 'no'} linear layers that give logits, and a head has one; choose a"
            " model with a single classifier"
        )
    (last,) = outputs
    shapes = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    return last, {key: shapes[key] for key in shapes if not key.startswith((inside, f"{last}."))}


def block_lists(name: str, model: nn.Module) -> list[str]:
    """Paths of the outermost lists of modules that hold layers, in the model's order."""
    paths: list[str] = []
    for path, module in model.named_modules():
        holds_layers = isinstance(module, nn.ModuleList) and any(len(list(part.children())) for part in module)
        if holds_layers and not path.startswith(tuple(f"{outer}." for outer in paths)):
            paths.append(path)
    if not paths:
        raise ModelError(f"model {name!r} has no list of blocks, whose layers adapters stand on; choose another model")
    return paths


def remove_last_layer(model: nn.Module, family: Family, missing: Collection[str]) -> dict[str, Tensor]:
    """Put an identity in the place of the last layer; the tensors below it that a head begins with.

    Matrices that files lack are drawn for each task, and zero in the model, so that equal files are equal models.
    """
    if family.head[0].name:
        model.set_submodule(family.head[0].name, nn.Identity())
    drawn = [key for key, shape in family.parts.items() if key in missing and len(shape) > 1]
    for key in drawn:
        model.get_parameter(key).data.zero_()
    return {key: model.get_parameter(key).detach().clone() for key in family.parts if key not in drawn}


def stock_outputs(
    backbone: Backbone, ids: Tensor, types: Tensor, lengths: Sequence[int], *, targets: Tensor | None = None
) -> Tensor:
    """The output of one client's texts as a padded batch: (texts, width), or (targets, vocabulary).

    `ids` and `types` are (tokens,) int64 of texts of these lengths, one after another; `targets` (targets,) int64 are
    the places of the tokens that are to be written.
    """
    model, padding = backbone.model, padding_id(backbone)
    if targets is not None and backbone.family.seq2seq:
        return _written_outputs(model, ids, lengths, targets, padding=padding)
    inputs = {"input_ids": _padded(ids, lengths, padding)}
    inputs["attention_mask"] = _padded(torch.ones_like(ids), lengths, 0)
    if "token_type_ids" in {*backbone.tokenizer.model_input_names} & {*signature(model.forward).parameters}:
        inputs["token_type_ids"] = _padded(types, lengths, 0)
    logits: Tensor = model(**inputs).logits
    if targets is None:
        return logits
    return logits[inputs["attention_mask"].bool()][targets - 1]


def _written_outputs(
    model: transformers.PreTrainedModel, ids: Tensor, lengths: Sequence[int], targets: Tensor, *, padding: int
) -> Tensor:
    """Logits (targets, vocabulary) of an encoder's and a decoder's model: what is not to be written is read."""
    is_target = torch.zeros_like(ids, dtype=torch.bool).index_fill_(0, targets.long(), True)
    written = [int(part.sum()) for part in torch.split(is_target, list(lengths))]
    read = [length - count for length, count in zip(lengths, written, strict=True)]
    labels = _padded(ids[is_target], written, -100)
    output = model(
        input_ids=_padded(ids[~is_target], read, padding),
        attention_mask=_padded(torch.ones_like(ids[~is_target]), read, 0),
        labels=labels,
    )
    logits: Tensor = output.logits[labels != -100]
    return logits


def _padded(values: Tensor, lengths: Sequence[int], padding: int) -> Tensor:
    """(texts, longest) of the values of texts that lie one after another."""
    return pad_sequence(list(torch.split(values, list(lengths))), batch_first=True, padding_value=padding)


def padding_id(backbone: Backbone) -> int:
    """The id that the model itself takes for padding, or its tokenizer's."""
    own = backbone.model.config.get_text_config().pad_token_id
    return int(backbone.tokenizer.pad_token_id if own is None else own)


def generate(backbone: Backbone, rows: list[list[int]], *, new_tokens: int, ends: list[int]) -> list[list[int]]:
    """The likeliest tokens after every prompt up to one of `ends`, by the stock model's own `generate`."""
    model = backbone.model
    ids, mask = pad_left(rows, device=backbone.device)
    ids = ids.masked_fill(mask == 0, padding_id(backbone))
    config = transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=ends,
        pad_token_id=padding_id(backbone),
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    written = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    start = 1 if backbone.family.seq2seq else ids.shape[1]
    rows_written: list[list[int]] = written[:, start:].tolist()
    return rows_written


def positions_of(backbone: Backbone, positions: int | None) -> tuple[int | None, int]:
    """(positions, how many of them no token takes) of a model whose config and tokenizer may disagree about its texts.

    A table of positions with a padding index begins behind it.
    """
    tables = [module for name, module in backbone.model.named_modules() if name.endswith("position_embeddings")]
    skipped = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    longest = min(positions or 1 << 20, int(backbone.tokenizer.model_max_length))
    return longest, max(skipped, default=0) if longest == positions else 0
