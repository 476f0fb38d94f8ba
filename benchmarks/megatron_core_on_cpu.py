"""What megatron-core 0.16 needs to run on CPUs with gloo: importing this file patches torch; call `patch()` after.

The one idea: each patch is one function with its reason. None changes what is computed; where megatron-core names a
CUDA device or a feature of NCCL without asking, the CPU's equivalent is put in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

CPU = torch.device("cpu")


def name_the_cpu() -> None:
    """Buffers are made on torch.cuda.current_device(), and the pipeline waits for the device."""
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *_: None


def make_on_the_cpu() -> None:
    """The causal mask, counts of tokens and the optimizer's scalars are made on a literal "cuda"."""

    def moved(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            if options.get("device") == "cuda":
                options["device"] = CPU
            return factory(*args, **options)

        return make

    for name in ("zeros", "ones", "tensor"):
        setattr(torch, name, moved(getattr(torch, name)))


def send_one_by_one() -> None:
    """gloo cannot join collectives into one; must come before megatron-core is imported, which takes the name over."""
    torch.distributed._coalescing_manager = lambda *_, **__: contextlib.nullcontext()


def draw_nothing() -> None:
    """Dropout, even of probability 0, forks the states of CUDA's generators."""
    from megatron.core.tensor_parallel import random

    class NoStates:
        def fork(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    random.initialize_rng_tracker = lambda *_: None
    random._CUDA_RNG_STATE_TRACKER = NoStates()


def norm_under_sequence_parallel() -> None:
    """Only the norms of apex and of Transformer Engine, which need CUDA, mark their weights for the sum over tp."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def marked(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def split_optimizer_of_cpu_weights() -> None:
    """The distributed optimizer sorts weights by the name of their type, which must be a CUDA one."""
    name_of = torch.Tensor.type

    def named(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        name = name_of(tensor, *args, **options)
        return "torch.cuda.FloatTensor" if name == "torch.FloatTensor" else name

    torch.Tensor.type = named


name_the_cpu()
make_on_the_cpu()
send_one_by_one()


def patch() -> None:
    """What changes megatron-core itself."""
    draw_nothing()
    norm_under_sequence_parallel()
    split_optimizer_of_cpu_weights()
