"""A Source (interop.py) whose tensors are all in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron3d.config import Config


@dataclass(frozen=True)
class Memory:
    """A Source of whole tensors in memory."""

    config: Config
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Kind -> canonical name -> tensor."""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """As given."""
        return tuple(self.tensors)

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Of a tensor."""
        return self.tensors[kind][name].dtype

    def read(self, kind: str, name: str) -> Tensor:
        """A copy."""
        return self.tensors[kind][name].clone()
