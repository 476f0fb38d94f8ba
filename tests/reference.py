"""The model and its training in plain, single-process PyTorch: the independent reference of the parity tests.

Imports nothing of the product. Weights are a dict by canonical name; everything is differentiated by autograd.
Shapes: (B, S, H), as textbooks write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def _norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    bias = weights.get(f"{name}.bias")
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], bias, eps)
    return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _frequencies(model: Any) -> Tensor:
    frequencies = model.rope_theta ** -(torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim)
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    scaled = []
    for frequency in frequencies.tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original_max_position / scaling.high_freq_factor:
            scaled.append(frequency)
        elif wavelength > scaling.original_max_position / scaling.low_freq_factor:
            scaled.append(frequency / scaling.factor)
        else:
            smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            scaled.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return torch.tensor(scaled, dtype=torch.float64)


def _rotate(x: Tensor, model: Any) -> Tensor:
    """x (B, heads, S, D)."""
    angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), _frequencies(model))
    turn = torch.polar(torch.ones_like(angles), angles)
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def _attention(x: Tensor, weights: Weights, name: str, model: Any) -> Tensor:
    batch, length, _ = x.shape

    def heads(part: str) -> Tensor:
        return _linear(x, weights, f"{name}.{part}").view(batch, length, -1, model.head_dim)

    query, key, value = heads("query"), heads("key"), heads("value")
    if model.qk_norm:
        query = _norm(query, weights, f"{name}.query_norm", model.norm_epsilon)
        key = _norm(key, weights, f"{name}.key_norm", model.norm_epsilon)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if model.position_embedding == "rope":
        query, key = _rotate(query, model), _rotate(key, model)
    repeat = model.num_attention_heads // model.num_query_groups
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(model.head_dim)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    return _linear(mixed, weights, f"{name}.output")


def _mlp(x: Tensor, weights: Weights, name: str, model: Any) -> Tensor:
    widened = _linear(x, weights, f"{name}.up")
    if model.activation == "swiglu":
        widened = F.silu(_linear(x, weights, f"{name}.gate")) * widened
    else:
        widened = F.gelu(widened, approximate="tanh" if model.activation == "gelu_tanh" else "none")
    return _linear(widened, weights, f"{name}.down")


def logits(tokens: Tensor, weights: Weights, model: Any) -> Tensor:
    """Token ids (B, S) -> logits (B, S, V)."""
    x = weights["embedding.word.weight"][tokens]
    if model.position_embedding == "learned":
        x = x + weights["embedding.position.weight"][: tokens.shape[1]]
    for i in range(model.num_layers):
        layer = f"layers.{i}"
        attention_input = _norm(x, weights, f"{layer}.attention_norm", model.norm_epsilon)
        x = x + _attention(attention_input, weights, f"{layer}.attention", model)
        x = x + _mlp(_norm(x, weights, f"{layer}.mlp_norm", model.norm_epsilon), weights, f"{layer}.mlp", model)
    x = _norm(x, weights, "head.norm", model.norm_epsilon)
    head = weights["embedding.word.weight" if model.tied_embeddings else "head.output.weight"]
    return x @ head.T


def loss(tokens: Tensor, labels: Tensor, weights: Weights, model: Any) -> Tensor:
    """Mean over the valid labels (those >= 0) of tokens and labels (B, S)."""
    values = logits(tokens, weights, model)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return F.cross_entropy(values.flatten(0, 1), labels.flatten(), ignore_index=-100)


def train(
    weights: Weights,
    model: Any,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    lr: Callable[[int], float],
    clip: float,
    decay: float = 0.0,
) -> tuple[list[float], list[float], Weights]:
    """SGD over global batches of (tokens, labels); losses, gradient norms before clipping, final weights."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    losses, norms = [], []
    for step, (tokens, labels) in enumerate(batches):
        value = loss(tokens, labels, weights, model)
        grads = torch.autograd.grad(value, list(weights.values()))
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        with torch.no_grad():
            for parameter, grad in zip(weights.values(), grads, strict=True):
                rate = decay if parameter.dim() == 2 else 0.0
                parameter -= lr(step) * (scale * grad + rate * parameter)
        losses.append(value.item())
        norms.append(norm)
    return losses, norms, {name: value.detach() for name, value in weights.items()}
