"""Sizes of model, mesh and batch: those that follow from others, and whether all of them fit together.

The one idea: divisibility is the whole question, so each function takes plain settings, fills in what was left open,
and refuses with the numbers and the legal choices. `validate.resolve` calls them in order, after it has checked each
number by itself.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megatron3d.config import BatchConfig, ConfigError, ModelConfig, ParallelConfig
from megatron3d.cost import head_flops, layer_flops
from megatron3d.schedule import split_layers
from megatron3d.words import commas, divisors, flag, listed


def resolve_mesh(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """dp and sp; the axes multiply to the number of processes."""
    tp, pp, dp = parallel.tp, parallel.pp, parallel.dp
    if world_size < 1 or world_size % (tp * pp):
        raise ConfigError(
            f"The world size, {world_size}, is not a multiple of tp x pp = {tp} x {pp} = {tp * pp}. Start {tp * pp} "
            f"processes or a multiple (torchrun --nproc-per-node {tp * pp} ...), or choose --tp and --pp so that their "
            f"product is {divisors(max(world_size, 1))}."
        )
    if dp and tp * pp * dp != world_size:
        raise ConfigError(
            f"The world size, {world_size}, is not tp x pp x dp = {tp} x {pp} x {dp} = {tp * pp * dp}. Start "
            f"{tp * pp * dp} processes, or leave --dp out: it would be {world_size // (tp * pp)}."
        )
    if parallel.sp and tp == 1:
        raise ConfigError("--sp has no effect with --tp 1: there is nothing to split. Leave it out, or raise --tp.")
    return replace(parallel, dp=world_size // (tp * pp), sp=tp > 1 if parallel.sp is None else parallel.sp)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Widths and lengths of the decoder."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.head_dim and hidden % heads:
        raise ConfigError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}. Choose {divisors(hidden)} "
            "heads, or give the width of one with --head-dim."
        )
    groups = model.num_query_groups or heads
    if heads % groups:
        raise ConfigError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}, so query heads cannot share "
            f"key/value heads evenly. Choose {divisors(heads)}."
        )
    default_ffn = -(-8 * hidden // 192) * 64 if model.activation == "swiglu" else 4 * hidden
    model = replace(
        model,
        head_dim=model.head_dim or hidden // heads,
        num_query_groups=groups,
        ffn_hidden_size=model.ffn_hidden_size or default_ffn,
        max_position=model.max_position or model.seq_length,
    )
    _check_context(model)
    if model.position_embedding == "rope":
        _check_rotary(model)
    return model


def resolve_split(parallel: ParallelConfig, model: ModelConfig) -> ParallelConfig:
    """stage_layers; the sizes of a resolved `model` can be split over tp, and its layers over pp.

    Fewer key/value heads than tp, or a number that tp does not divide, is legal: each rank then holds them whole. So is
    a vocabulary that tp does not divide: it is padded.
    """
    tp, pp, layers, stages = parallel.tp, parallel.pp, model.num_layers, parallel.stage_layers
    names = ["num_attention_heads", "ffn_hidden_size"] + ["seq_length"] * bool(parallel.sp)
    sizes = [getattr(model, name) for name in names]
    described = [f"{flag(name)} {size}" for name, size in zip(names, sizes, strict=True)]
    if undivided := [text for text, size in zip(described, sizes, strict=True) if size % tp]:
        raise ConfigError(
            f"--tp {tp} does not divide {listed(undivided, 'and')}. With {listed(described, 'and')} it can be "
            f"{divisors(math.gcd(*sizes))}{'; --no-sp frees the sequence length' if parallel.sp else ''}."
        )
    if layers < pp - 1:  # the last one has the head
        raise ConfigError(
            f"--num-layers {layers} cannot fill --pp {pp} stages: all but the last need at least one layer. Choose "
            f"--pp of at most {layers + 1}."
        )
    balanced = split_layers(layers, pp, head_flops(model) / layer_flops(model))
    if stages and (len(stages) != pp or sum(stages) != layers or min((*stages[:-1], stages[-1] + 1)) < 1):
        raise ConfigError(
            f"--stage-layers {commas(stages)} gives {len(stages)} stages a sum of {sum(stages)} layers, but the model "
            f"has --num-layers {layers} on --pp {pp} stages, all but the last of at least one layer. A balanced split "
            f"is {commas(balanced)}."
        )
    return replace(parallel, stage_layers=stages or balanced)


def resolve_batch(batch: BatchConfig, parallel: ParallelConfig) -> BatchConfig:
    """global_batch_size, a whole number of microbatches on each data-parallel rank."""
    micro, dp = batch.micro_batch_size, parallel.dp
    portion = micro * dp
    total = batch.global_batch_size or portion
    if total % portion:
        below = total // portion * portion
        nearest = [size for size in (below, below + portion) if size]
        raise ConfigError(
            f"--global-batch-size {total} is not a multiple of --micro-batch-size x dp = {micro} x {dp} = {portion}. "
            f"The nearest legal choice is {listed(nearest, 'or')}."
        )
    return replace(batch, global_batch_size=total)


def _check_context(model: ModelConfig) -> None:
    """The sequence fits into what the model can attend to."""
    seq, longest, window = model.seq_length, model.max_position, model.sliding_window
    if seq > longest:
        raise ConfigError(
            f"--seq-length {seq} is longer than the model's longest context, --max-position {longest}. Choose at most "
            f"{longest} tokens, or raise --max-position."
        )
    if window and seq > window:
        raise ConfigError(
            f"--seq-length {seq} is longer than the model's sliding window of {window} tokens, and windowed attention "
            f"is not built. Choose at most {window} tokens, or --sliding-window 0 for full attention."
        )


def _check_rotary(model: ModelConfig) -> None:
    """Pairs of values can be turned, by frequencies that make sense."""
    width, scaling = model.head_dim, model.rope_scaling
    if width % 2:
        raise ConfigError(
            f"Rotary positions turn pairs of values, but heads are {width} wide, an odd number (--hidden-size "
            f"{model.hidden_size}, --num-attention-heads {model.num_attention_heads}). Choose --head-dim "
            f"{width - 1 or 2} or {width + 1}, or --position-embedding learned."
        )
    if scaling is None:
        return
    factor, original = scaling.factor, scaling.original_max_position
    if not 1 <= factor < math.inf or original < 1:
        raise ConfigError(
            f"rope_scaling: factor {factor} and original_max_position {original} must both be at least 1; Llama 3.1 "
            "has 8.0 and 8192."
        )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 0 < low < high < math.inf:
        raise ConfigError(
            f"rope_scaling: low_freq_factor {low} and high_freq_factor {high} must be positive and the second greater, "
            "since the frequencies between them are blended; Llama 3.1 has 1.0 and 4.0."
        )
