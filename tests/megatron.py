"""Checkpoints of Megatron-LM for tests: the fixtures, files changed and written again, random models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron3d.config import Config, ModelConfig, RopeScaling
from megatron3d.megatron_files import MegatronSource
from megatron3d.params import param_table
from megatron3d.validate import resolve
from tests import toy
from tests.memory import Memory

FIXTURES = Path(__file__).parent / "fixtures" / "megatron"
MODELS = ("llama", "gpt2")
FOLDERS = ("legacy_tp1_pp1", "legacy_tp2_pp2", "torch_dist_tp1_pp1", "torch_dist_tp2_pp2")
LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_query_groups=2,
    head_dim=8,
    vocab_size=131,
    seq_length=64,
    max_position=64,
)
GPT2 = replace(
    LLAMA,
    ffn_hidden_size=192,
    num_query_groups=6,
    activation="gelu",
    normalization="layernorm",
    position_embedding="learned",
    bias="all",
    tied_embeddings=True,
)
FILE = "model_optim_rng.pt"
State = dict[str, Any]


def weights(source: Any, kind: str = "weight") -> dict[str, Tensor]:
    """All of a source's tensors."""
    return {spec.name: source.read(kind, spec.name) for spec in param_table(source.config.model)}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def fixture_weights(model: str) -> dict[str, Tensor]:
    return weights(MegatronSource(FIXTURES / model / "legacy_tp1_pp1"))


def random_source(model: ModelConfig, meta: Mapping[str, Any] | None = None) -> Memory:
    """Random weights of a model."""
    config = resolve(Config(model=model), world_size=1)
    weights = {name: value.bfloat16() for name, value in toy.random_weights(config.model).items()}
    return Memory(config, {"weight": weights}, meta or {})


def states(model: str, folder: str = "legacy_tp1_pp1") -> dict[str, State]:
    """Rank folder -> what its file holds, read by torch."""
    paths = sorted((FIXTURES / model / folder).glob(f"iter_0000007/*/{FILE}"))
    return {path.parent.name: torch.load(path, weights_only=False) for path in paths}


def put(folder: Path, files: Mapping[str, State]) -> Path:
    for name, state in files.items():
        (folder / name).mkdir(parents=True)
        torch.save(state, folder / name / FILE)
    return folder


SETTINGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "tanh": replace(GPT2, activation="gelu_tanh", dropout=0.1),
    "exact, without biases": replace(GPT2, bias="none"),
    "qwen2": replace(LLAMA, bias="qkv", rope_theta=1e6, norm_epsilon=1e-6),
    "qwen3": replace(LLAMA, qk_norm=True, tied_embeddings=True, head_dim=16),
    "scaled": replace(
        LLAMA,
        max_position=96,
        rope_theta=5e5,
        rope_scaling=RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
    ),
    "multi-query": replace(LLAMA, num_query_groups=1),
}
