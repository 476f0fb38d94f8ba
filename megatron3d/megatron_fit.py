"""Whether a checkpoint of Megatron-LM holds the model that its args describe.

The one idea: names and shapes decide, so all that does not fit is known, and told at once, before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron3d.config import ModelConfig
from megatron3d.megatron_lm import OUTPUT, WORDS, Shared, whole_shape
from megatron3d.megatron_stored import Kept, Whole
from megatron3d.params import ParamSpec, param_table


def misfits(kept: Kept, model: ModelConfig, shared: Sequence[Shared]) -> Iterator[str]:
    """All that differs between what is there and the tensors `shared` that a resolved `model` needs, one by one."""
    specs = {spec.name: spec for spec in param_table(model)}
    there = dict(kept.tensors)
    copy = there.pop(OUTPUT, None) if model.tied_embeddings else None
    for one in shared:
        tensor = there.pop(one.foreign.name, None)
        if tensor is None:
            yield f"{one.foreign.name} is missing"
            continue
        yield from _misfit(one, tensor, specs, kept.args.get("padded_vocab_size"))
        if one.foreign.name == WORDS and copy is not None and (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            yield (
                f"{OUTPUT} has shape {copy.shape} and type {copy.dtype}, but args say that it is {WORDS}, with shape "
                f"{tensor.shape} and type {tensor.dtype}"
            )
    yield from (f"{name} of shape {tensor.shape} is not expected" for name, tensor in there.items())


def _misfit(shared: Shared, tensor: Whole, specs: Mapping[str, ParamSpec], padded: object) -> Iterator[str]:
    """What is wrong with one tensor; `padded`: what args say of the rows of the padded vocabulary."""
    needed = whole_shape(shared, specs)
    if shared.padded:
        rows = padded if type(padded) is int else next(iter(tensor.shape), 0)
        needed = (max(rows, needed[0]), *needed[1:])
    if tensor.shape != needed:
        yield f"{shared.foreign.name} has shape {tensor.shape}, the model needs {needed}"
    if not tensor.dtype.is_floating_point:
        yield f"{shared.foreign.name} has values of type {tensor.dtype}"
