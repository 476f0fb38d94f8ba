"""torch's types by the names that configs use."""

from __future__ import annotations

import torch

from megatron3d.config import DType

DTYPES: dict[DType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
