"""The problem that every contender solves: one small Llama-shaped model, its first weights, its tokens, and the clock.

The one idea: a comparison is fair if only the parallelism differs. Shape, initial values, data, optimizer, number of
steps and what counts as a step's time are stated here once; contenders (ours.py, and the peers' files) only say how
their library is told to do it. Nothing here imports any of them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.turns import wait_for_turn


class Shape(NamedTuple):
    """Of the model and the batch."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    ffn: int = 688
    vocab: int = 8192
    seq: int = 256
    micro_batch: int = 2
    global_batch: int = 16


SHAPE = Shape()
THETA, EPS = 10_000.0, 1e-5  # rotary base, and what RMSNorm adds to the mean square
LR, BETAS, ADAM_EPS = 1e-3, (0.9, 0.95), 1e-8  # AdamW without weight decay or clipping
ADAMW: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": ADAM_EPS, "weight_decay": 0.0}  # as torch names them
STEPS, WARMUP = 13, 3  # steps run; the first ones are not timed


def initial_weights() -> dict[str, Tensor]:
    """Whole fp32 tensors under Hugging Face's Llama names: matrices of normal(0, 0.02), norms of one; head not tied."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    s = SHAPE
    weights = {"model.embed_tokens.weight": normal(s.vocab, s.hidden)}
    for i in range(s.layers):
        at = f"model.layers.{i}."
        for name in ("q", "k", "v", "o"):
            weights[f"{at}self_attn.{name}_proj.weight"] = normal(s.hidden, s.hidden)
        weights[f"{at}mlp.gate_proj.weight"] = normal(s.ffn, s.hidden)
        weights[f"{at}mlp.up_proj.weight"] = normal(s.ffn, s.hidden)
        weights[f"{at}mlp.down_proj.weight"] = normal(s.hidden, s.ffn)
        weights[f"{at}input_layernorm.weight"] = torch.ones(s.hidden)
        weights[f"{at}post_attention_layernorm.weight"] = torch.ones(s.hidden)
    weights["model.norm.weight"] = torch.ones(s.hidden)
    weights["lm_head.weight"] = normal(s.vocab, s.hidden)
    return weights


def global_batch(step: int) -> Tensor:
    """Random ids (global batch, seq + 1) of one step: two batches in turn, which are learnt, so the loss falls."""
    generator = torch.Generator().manual_seed(1000 + step % 2)
    return torch.randint(0, SHAPE.vocab, (SHAPE.global_batch, SHAPE.seq + 1), generator=generator)


def microbatches(step: int, dp_rank: int = 0, dp: int = 1) -> list[tuple[Tensor, Tensor]]:
    """(inputs, labels), (micro batch, seq) each, of one data-parallel rank."""
    share = global_batch(step).chunk(dp)[dp_rank]
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in share.split(SHAPE.micro_batch)]


def resident_mib() -> float:
    """Memory of this process now, in MiB. Contenders ask after imports and the start of the process group, before the
    model: what a framework's code takes says nothing about a layout."""
    return _mib("VmRSS")


def _mib(line: str) -> float:
    """A line of the kernel's account of this process.

    Not getrusage: its ru_maxrss begins with what the launcher had when it forked.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) / 1024


class Measured(NamedTuple):
    """What one rank saw."""

    seconds: list[float]
    losses: list[float | None]
    """Mean over the global batch before the update; None on ranks that do not know it."""
    memory: float
    """Peak above what imports had taken, MiB."""


def measure(step: Callable[[int], float | None], imported: float, steps: int) -> Measured:
    """Runs all steps; `imported` is what `resident_mib` was before the model."""
    seconds, losses = [], []
    for number in range(steps):
        wait_for_turn()
        begin = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - begin)
    wait_for_turn()
    return Measured(seconds, losses, _mib("VmHWM") - imported)


def timed(steps: list[float]) -> list[float]:
    """What counts of the steps of a run."""
    return steps[min(WARMUP, len(steps) - 1) :]


def report(name: str, ranks: list[Measured]) -> None:
    """Prints one line of JSON for peers.py: a step lasts as long as on its slowest rank."""
    slowest = [max(times) for times in zip(*(rank.seconds for rank in ranks), strict=True)]
    step = statistics.median(timed(slowest))
    losses = next(rank.losses for rank in ranks if None not in rank.losses)
    result = {
        "contender": name,
        "ranks": len(ranks),
        "step_ms": round(1e3 * step, 2),
        "steps_ms": [round(1e3 * seconds, 2) for seconds in slowest],
        "tokens_per_second": round(SHAPE.global_batch * SHAPE.seq / step, 1),
        "peak_mib": [round(rank.memory, 1) for rank in ranks],
        "losses": losses,
    }
    print(json.dumps(result), flush=True)
