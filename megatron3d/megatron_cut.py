"""A model cut into what each rank of Megatron-LM keeps in its file.

The one idea: what a stage's ranks hold of which tensors follows from the model and the layout alone; the values are cut
from whole tensors, each of which is read once for all ranks. Nothing is put together in memory: a share is a list of
views, and of zeros where the vocabulary is padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron3d.config import ConfigError, ModelConfig
from megatron3d.interop import Source, cast, dealt
from megatron3d.megatron_args import args_of
from megatron3d.megatron_lm import LAYER, OUTPUT, WORDS, Shared, engine_name, whole_shape
from megatron3d.params import ParamSpec
from megatron3d.torch_writer import Later
from megatron3d.words import divisors, flag, listed

MULTIPLE = 128  # Megatron-LM pads the vocabulary to a multiple of this times tp
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer that have an extra state, empty but expected."""


class Plan(NamedTuple):
    """What is to be written, and how."""

    source: Source
    specs: dict[str, ParamSpec]
    tensors: list[Shared]
    tp: int
    pp: int
    dtype: torch.dtype | None
    """Of all weights; None: as each is kept."""
    engine: bool
    """Names of Transformer Engine's layers."""

    @property
    def model(self) -> ModelConfig:
        """Of the source."""
        return self.source.config.model

    @property
    def rows(self) -> int:
        """Of the padded vocabulary."""
        step = MULTIPLE * self.tp
        return -(-self.model.vocab_size // step) * step


def check_layout(model: ModelConfig, tp: int, pp: int) -> None:
    """ConfigError unless tp x pp ranks share a resolved `model` evenly, as Megatron-LM needs it."""
    for name, ways, fields in (
        ("--tp", tp, ("num_attention_heads", "num_query_groups", "ffn_hidden_size")),
        ("--pp", pp, ("num_layers",)),
    ):
        sizes = {field: getattr(model, field) for field in fields}
        if ways < 1 or any(size % ways for size in sizes.values()):
            told = listed((f"{flag(field)} {size}" for field, size in sizes.items()), "and")
            raise ConfigError(
                f"{name} {ways} does not divide {told}, as Megatron-LM needs it to. It can be "
                f"{divisors(math.gcd(*sizes.values()))}."
            )


def layout_args(plan: Plan) -> dict[str, Any]:
    """The args of the model and of the layout. ConfigError for a model that Megatron-LM cannot express."""
    meta = plan.source.meta
    dtype = plan.dtype or plan.source.dtype("weight", plan.tensors[0].foreign.parts[0])
    return args_of(plan.model) | {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "virtual_pipeline_model_parallel_size": None,
        "padded_vocab_size": plan.rows,
        "make_vocab_size_divisible_by": MULTIPLE,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "transformer_impl": "transformer_engine" if plan.engine else "local",
        "ckpt_format": "torch",
        "iteration": meta.get("step", 0),
        "consumed_train_samples": meta.get("consumed_samples", 0),
        "no_save_optim": True,
        "no_save_rng": True,
    }


def stage_tensors(plan: Plan, stage: int) -> Iterator[tuple[str, Shared]]:
    """(name in the file, tensor) of all that a stage holds."""
    per_stage, last = plan.model.num_layers // plan.pp, plan.pp - 1
    for shared in plan.tensors:
        name = shared.foreign.name
        if match := LAYER.fullmatch(name):
            place, layer = divmod(int(match[1]), per_stage)
            name = f"decoder.layers.{layer}.{match[2]}"
        else:
            place = 0 if name.startswith("embedding.") else last
        if place == stage:
            yield engine_name(name) if plan.engine else name, shared
        if name == WORDS and plan.model.tied_embeddings and 0 < last == stage:
            yield OUTPUT, shared  # the last stage has a copy


def extra_states(plan: Plan, stage: int) -> Iterator[str]:
    """Names of the extra states that Megatron-LM expects of a stage."""
    modules = LINEARS + ("self_attention.core_attention",) * plan.engine
    for layer in range(plan.model.num_layers // plan.pp):
        yield from (f"decoder.layers.{layer}.{module}._extra_state" for module in modules)
    if stage == plan.pp - 1:
        yield "output_layer._extra_state"


def share_of(plan: Plan, shared: Shared) -> Later:
    """Type and shape of what each tensor rank holds of a tensor."""
    shape = list(whole_shape(shared, plan.specs))
    if shared.padded:
        shape[0] = plan.rows
    if shared.split is not None:
        shape[shared.split] //= plan.tp
    return Later(plan.dtype or plan.source.dtype("weight", shared.foreign.parts[0]), tuple(shape))


def size_of(plan: Plan, shared: Shared) -> int:
    """Bytes of a whole tensor, as it is read or as it is written."""
    parts, written = shared.foreign.parts, share_of(plan, shared).dtype.itemsize
    values = sum(plan.specs[part].size for part in parts)
    return values * max(written, plan.source.dtype(_kind(plan), parts[0]).itemsize)


def shares(plan: Plan, shared: Shared) -> list[list[Tensor]]:
    """What the tensor ranks hold of a tensor, in parts to be stacked along the first dim."""
    name, dtype = shared.foreign.name, share_of(plan, shared).dtype
    parts = [cast(name, plan.source.read(_kind(plan), part), dtype) for part in shared.foreign.parts]
    if shared.split is None:
        return [dealt(shared.foreign, parts)] * plan.tp
    if shared.split:
        return [[columns] for columns in parts[0].chunk(plan.tp, shared.split)]
    if shared.padded:
        return [_padded(parts[0], rank * (plan.rows // plan.tp), plan.rows // plan.tp) for rank in range(plan.tp)]
    if len(parts) == 1:
        return [[rows] for rows in parts[0].chunk(plan.tp)]
    pieces = dealt(shared.foreign, parts)
    each = len(pieces) // plan.tp
    return [pieces[rank * each : (rank + 1) * each] for rank in range(plan.tp)]


def _kind(plan: Plan) -> str:
    """What is read: masters where a type is asked for."""
    return "master" if plan.dtype and "master" in plan.source.kinds else "weight"


def _padded(values: Tensor, first: int, count: int) -> list[Tensor]:
    """So many rows from `first` on, zeros after the last one."""
    held = values[first : first + count]
    zeros = values.new_zeros(count - len(held), *values.shape[1:])
    return [part for part in (held, zeros) if len(part)]
