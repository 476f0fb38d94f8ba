"""The model in plain PyTorch, and the contender of one process: the reference of all ratios.

`python -m benchmarks.plain`. The one idea: modules as anyone would write them, under Hugging Face's Llama names, so
that a library that parallelises a given model has one to work on. What the peers' libraries add is in their own files.

Shapes: B micro batch, S sequence, H hidden, D width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import job, problem
from benchmarks.problem import SHAPE

ALL_LAYERS = range(SHAPE.layers)


class Attention(nn.Module):
    """Causal attention with rotary positions over whatever heads the projections yield."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(SHAPE.hidden, SHAPE.hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, H)."""

        def heads(projection: nn.Module) -> Tensor:
            return projection(x).unflatten(-1, (-1, SHAPE.hidden // SHAPE.heads)).transpose(1, 2)  # (B, heads, S, D)

        query, key, value = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


@functools.cache
def rotary_tables() -> tuple[Tensor, Tensor]:
    """Cosines and sines, (S, D) each; both halves of a head turn by the same angles."""
    width = SHAPE.hidden // SHAPE.heads
    speeds = problem.THETA ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(SHAPE.seq, dtype=torch.float64), speeds).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor) -> Tensor:
    """x (B, heads, S, D) turned by its positions."""
    cos, sin = rotary_tables()
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(SHAPE.hidden, SHAPE.ffn, bias=False)
        self.up_proj = nn.Linear(SHAPE.hidden, SHAPE.ffn, bias=False)
        self.down_proj = nn.Linear(SHAPE.ffn, SHAPE.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, H)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = Attention()
        self.post_attention_layernorm = norm()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, H)."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def norm() -> nn.Module:
    """RMSNorm over the hidden dim."""
    return nn.RMSNorm(SHAPE.hidden, eps=problem.EPS)


class Decoder(nn.Module):
    """Some consecutive layers; the embedding comes with the first one, the head with the last."""

    def __init__(self, layers: Sequence[int] = ALL_LAYERS) -> None:
        super().__init__()
        self.has_embedding, self.has_head = ALL_LAYERS[0] in layers, ALL_LAYERS[-1] in layers
        self.model = nn.Module()
        if self.has_embedding:
            self.model.embed_tokens = nn.Embedding(SHAPE.vocab, SHAPE.hidden)
        self.model.layers = nn.ModuleDict({str(i): Block() for i in layers})
        if self.has_head:
            self.model.norm = norm()
            self.lm_head = nn.Linear(SHAPE.hidden, SHAPE.vocab, bias=False)
        weights = problem.initial_weights()
        self.load_state_dict({name: weights[name] for name in self.state_dict()})

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, S) or hidden states (B, S, H) -> hidden states or logits (B, S, vocabulary)."""
        if self.has_embedding:
            x = self.model.embed_tokens(x)
        for block in self.model.layers.values():
            x = block(x)
        return self.lm_head(self.model.norm(x)) if self.has_head else x


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of one microbatch: logits (B, S, vocabulary), labels (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    """Trains and reports."""
    flags = job.flags().parse_args()
    imported = job.begin()
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), **problem.ADAMW)

    def step(number: int) -> float:
        total, microbatches = 0.0, problem.microbatches(number)
        for tokens, labels in microbatches:
            loss = mean_loss(model(tokens), labels) / len(microbatches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    job.finish("plain PyTorch", problem.measure(step, imported, flags.steps))


if __name__ == "__main__":
    main()
