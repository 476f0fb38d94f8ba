"""Fused operations of megatron3d, one function each, as forward/backward pairs without autograd.

The one idea: a caller names the operation, this module names who computes it. `reference.py` is the specification in
plain PyTorch and the path on CPUs; layers.py and optimizer.py wrap and call these functions and know no device.
"""

from __future__ import annotations

from .reference import (
    RotaryScaling,
    accumulate_weight_grad,
    adamw,
    cross_entropy_backward,
    cross_entropy_local,
    cross_entropy_merge,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    rotary,
    rotary_backward,
    rotary_tables,
    sgd,
    sum_of_squares,
    swiglu,
    swiglu_backward,
)

__all__ = [
    "RotaryScaling",
    "accumulate_weight_grad",
    "adamw",
    "cross_entropy_backward",
    "cross_entropy_local",
    "cross_entropy_merge",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "rotary_tables",
    "sgd",
    "sum_of_squares",
    "swiglu",
    "swiglu_backward",
]
