"""FLOPs against counts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config import ModelConfig
from megatron3d.cost import flops_per_token
from megatron3d.params import param_table
from megatron3d.sizes import resolve_model

BASE = ModelConfig(bias="none")
MHA = replace(BASE, num_layers=3, hidden_size=64, num_attention_heads=8, head_dim=16, seq_length=48, vocab_size=131)
GQA = replace(BASE, num_layers=2, hidden_size=96, num_attention_heads=6, head_dim=24, seq_length=64, vocab_size=500)
MQA = replace(BASE, num_layers=4, hidden_size=80, num_attention_heads=5, head_dim=32, seq_length=40, vocab_size=1001)
MHA = replace(MHA, num_query_groups=8, ffn_hidden_size=100)
GQA = replace(GQA, num_query_groups=2, ffn_hidden_size=200)
MQA = replace(MQA, num_query_groups=1, ffn_hidden_size=128)

# Queries 2 h H d, keys and values 4 h K d, output 2 H d h, attention 4 (seq / 2) H d, MLP 2 n h f; the head 2 h V.
HAND = [
    (MHA, "gelu", 3 * (3 * (16384 + 32768 + 16384 + 12288 + 25600) + 16768)),
    (MHA, "swiglu", 3 * (3 * (16384 + 32768 + 16384 + 12288 + 38400) + 16768)),
    (GQA, "gelu", 3 * (2 * (27648 + 18432 + 27648 + 18432 + 76800) + 96000)),
    (GQA, "swiglu", 3 * (2 * (27648 + 18432 + 27648 + 18432 + 115200) + 96000)),
    (MQA, "gelu_tanh", 3 * (4 * (25600 + 10240 + 25600 + 12800 + 40960) + 160160)),
    (MQA, "swiglu", 3 * (4 * (25600 + 10240 + 25600 + 12800 + 61440) + 160160)),
]


@pytest.mark.parametrize(
    ("model", "activation", "expected"), HAND, ids=lambda value: value if isinstance(value, str) else ""
)
def test_flops_per_token(model: ModelConfig, activation: str, expected: int) -> None:
    """METR-01: MHA, GQA, MQA x GELU, SwiGLU, ffn != 4 h, head_dim != h / heads: the hand count, to the last FLOP."""
    assert flops_per_token(resolve_model(replace(model, activation=activation))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "activation", "expected"), HAND, ids=lambda value: value if isinstance(value, str) else ""
)
def test_flops_follow_from_the_matrices(model: ModelConfig, activation: str, expected: int) -> None:
    """From the parameter table: 6 per matrix element but the embedding's, which is a look-up, plus attention."""
    resolved = resolve_model(replace(model, activation=activation))  # type: ignore[arg-type]
    used = [spec for spec in param_table(resolved) if len(spec.shape) == 2 and spec.name != "embedding.word.weight"]
    heads = resolved.num_attention_heads * resolved.head_dim
    per_token = 6 * sum(spec.size for spec in used) + 6 * resolved.num_layers * resolved.seq_length * heads
    assert flops_per_token(resolved) == expected == per_token


def test_full_attention_counts_the_whole_square() -> None:
    causal, full = (flops_per_token(MHA, full_attention=whole) for whole in (False, True))
    assert full - causal == 3 * 3 * 12288


def test_what_is_not_counted() -> None:
    """The table of learned positions, biases, norms and a tied head's sharing change nothing."""
    plain = flops_per_token(resolve_model(replace(MHA, activation="gelu")))
    other = replace(
        MHA, activation="gelu", tied_embeddings=True, bias="all", position_embedding="learned", qk_norm=True
    )
    assert flops_per_token(resolve_model(other)) == plain
