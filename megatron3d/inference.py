"""Sampling from a model that one process holds.

The one idea: the trained stage is the model; a token is drawn from the last row of its logits, with randomness keyed by
the seed. There is no key/value cache: each token runs the whole context, which is simple and right, and slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron3d.model import GPTStage


@torch.no_grad()
def sample(
    stage: GPTStage, prompt: Sequence[int], *, tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Yields `tokens` ids that continue `prompt` (at least one id).

    `temperature` 0 takes the likeliest id; `top_k` > 0 draws among so many likeliest. Only the last seq_length ids are
    seen. Ids beyond the vocabulary (padding) are never drawn.
    """
    device = next(stage.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    context = list(prompt)
    for _ in range(tokens):
        ids = torch.tensor(context[-stage.model.seq_length :], device=device).unsqueeze(1)  # (S, 1)
        logits: Tensor = stage(ids)[-1, 0, : stage.model.vocab_size].float().cpu()
        context.append(_draw(logits, temperature, top_k, generator))
        yield context[-1]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The maximum becomes 0 and the division is done in fp64, so that no temperature makes infinity or 0 / 0 of it.
    heights = (logits - logits.max()).double() / temperature
    return int(torch.multinomial(heights.softmax(0), 1, generator=generator))
