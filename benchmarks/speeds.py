"""How fast this machine multiplies and sends: `torchrun --nproc-per-node 2 -m benchmarks.speeds`.

The one idea: products and messages alone, in the shapes that the layouts have, the best of several trials. bounds.py
makes of it what a layout could reach.

Shapes: M rows of a microbatch (micro batch x sequence), K inputs, N outputs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import job
from benchmarks.bounds import HIDDEN, Passes
from benchmarks.problem import SHAPE

TRIALS, TRIAL_SECONDS = 8, 0.1
SPLITS = (1, 2)  # tensor-parallel sizes of the rows
EXCHANGES = 50


def best(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    work()
    begin = time.perf_counter()
    work()
    calls = max(1, round(TRIAL_SECONDS / (time.perf_counter() - begin)))
    trials = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        trials.append((time.perf_counter() - begin) / calls)
    return min(trials)


def product(inputs: int, outputs: int) -> Passes:
    """Of a linear layer: y (M, N) of x (M, K) and w (N, K); both gradients."""
    rows = SHAPE.micro_batch * SHAPE.seq
    x, w, y = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    forward = best(lambda: torch.mm(x, w.t(), out=y))
    return Passes(forward, best(lambda: torch.mm(y, w, out=dx)) + best(lambda: torch.mm(y.t(), x, out=dw)))


def attention(heads: int) -> Passes:
    """Of causal attention, which is two products and what the fused kernel does between them."""
    shape = (SHAPE.micro_batch, heads, SHAPE.seq, SHAPE.hidden // SHAPE.heads)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    y = forward()
    dy = torch.randn_like(y)
    return Passes(best(forward), best(lambda: torch.autograd.grad(y, (query, key, value), dy, retain_graph=True)))


def layer(tp: int) -> Passes:
    """All products of one block on one of `tp` ranks."""
    hidden, ffn = SHAPE.hidden, SHAPE.ffn
    parts = [
        product(hidden, 3 * hidden // tp),
        attention(SHAPE.heads // tp),
        product(hidden // tp, hidden),
        product(hidden, 2 * ffn // tp),
        product(ffn // tp, hidden),
    ]
    return Passes(*map(sum, zip(*parts, strict=True)))


def exchange() -> tuple[float, float]:
    """Of one byte sent while one is received: seconds, and seconds of a core."""
    neighbour = 1 - dist.get_rank()
    mine, theirs = torch.zeros(HIDDEN // 4), torch.empty(HIDDEN // 4)

    def swap() -> None:
        messages = [dist.isend(mine, neighbour), dist.irecv(theirs, neighbour)]
        for message in messages:
            message.wait()

    trials = []
    for _ in range(TRIALS):
        begin, begin_work = time.perf_counter(), time.process_time()
        for _ in range(EXCHANGES):
            swap()
        trials.append((time.perf_counter() - begin, time.process_time() - begin_work))
    seconds, work = (min(values) / (EXCHANGES * HIDDEN) for values in zip(*trials, strict=True))
    return seconds, work


def main() -> None:
    """Measures and prints one line of JSON: the first rank's speeds, while the second keeps another core as busy."""
    job.begin()
    byte, byte_work = exchange()
    speeds = {
        "layer": {tp: layer(tp) for tp in SPLITS},
        "head": {tp: product(SHAPE.hidden, SHAPE.vocab // tp) for tp in SPLITS},
        "byte": byte,
        "byte_work": byte_work,
    }
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"speeds": speeds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
