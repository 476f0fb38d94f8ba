"""What a model costs: floating-point operations, from its shape alone.

The one idea: model FLOPs count what the mathematics needs (causal attention once, no recomputation, no padding), so
that figures of different layouts and implementations compare. Pure arithmetic; rates are in metrics.py.
"""

from __future__ import annotations

from megatron3d.config import ModelConfig


def flops_per_token(model: ModelConfig, *, full_attention: bool = False) -> float:
    """Training FLOPs per token of a resolved model: 3 x forward, a multiply-add counting as two.

    Forward per layer: queries 2 h H d, keys and values 4 h K d, output 2 H d h, attention 4 s H d, MLP 2 n h f (n = 3
    with a gate, else 2); head 2 h V. Under a causal mask a query meets (seq + 1) / 2 keys on average, counted as
    s = seq / 2; `full_attention` counts s = seq, as most publications do.
    """
    return 3 * (model.num_layers * layer_flops(model, full_attention=full_attention) + head_flops(model))


def layer_flops(model: ModelConfig, *, full_attention: bool = False) -> float:
    """Of one layer's forward pass, per token."""
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys = model.num_query_groups * model.head_dim
    context = model.seq_length if full_attention else model.seq_length / 2
    matrices = 3 if model.activation == "swiglu" else 2
    projections = 2 * hidden * queries + 4 * hidden * keys + 2 * queries * hidden
    return projections + 4 * context * queries + 2 * matrices * hidden * model.ffn_hidden_size


def head_flops(model: ModelConfig) -> float:
    """Of the projection to the vocabulary, per token."""
    return 2 * model.hidden_size * model.vocab_size
