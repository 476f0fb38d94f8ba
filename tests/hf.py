"""Small random models of transformers, ours with the same weights, and a Source kept in memory.

Sizes are odd on purpose: 12 heads with 2 or 1 key/value heads, heads wider than hidden / heads, 131 ids; norm weights
and biases are random, since ones and zeros hide swaps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron3d.config import Config, ModelConfig
from megatron3d.interop import Source
from megatron3d.mesh import Mesh
from megatron3d.model import GPTStage
from megatron3d.params import param_table
from megatron3d.trainer import build_model
from megatron3d.validate import resolve
from tests import toy
from tests.memory import Memory

LONG, SHORT = 2048, 96
IDS = {"bos_token_id": 3, "eos_token_id": 5, "pad_token_id": 7}
WIDE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": SHORT,
    "rope_theta": 500000.0,
    **IDS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 2, "n_head": 12, "n_positions": SHORT, **IDS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {**GPT2, "n_positions": LONG, "n_layer": 4}),
    "gpt2-untied": (
        "gpt2",
        {
            **GPT2,
            "n_inner": 80,
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("llama", {**WIDE, "rms_norm_eps": 1e-5, "max_position_embeddings": LONG}),
    "llama-mqa-tied": ("llama", {**WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 4}),
    "llama-mha": ("llama", {**WIDE, "num_key_value_heads": 12, "rms_norm_eps": 1e-6}),
    "llama3": (
        "llama",
        {**WIDE, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "max_position_embeddings": LONG},
    ),
    "mistral": ("mistral", {**WIDE, "sliding_window": None, "max_position_embeddings": LONG}),
    "mistral-window": ("mistral", {**WIDE, "sliding_window": 40, "hidden_size": 50, "rms_norm_eps": 1e-5}),
    "qwen2": ("qwen2", {**WIDE, "max_position_embeddings": LONG}),
    "qwen2-mqa-tied": ("qwen2", {**WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-mha": ("qwen2", {**WIDE, "num_key_value_heads": 12, "rms_norm_eps": 1e-5}),
    "qwen3": ("qwen3", {**WIDE, "head_dim": 16, "max_position_embeddings": LONG}),
    "qwen3-mqa-tied": ("qwen3", {**WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
}
"""Name -> model_type and settings of transformers."""


def random_model(case: str, seed: int = 1) -> Any:
    """A model of transformers with no value 0 or 1 in it, in fp32, for inference."""
    family, settings = CASES[case]
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            vector, scale = parameter.dim() == 1, 0.3 if name.endswith("weight") else 0.1
            parameter.copy_(noise * 0.08 if not vector else noise * scale + float(name.endswith("weight")))
    return model


def saved(case: str, folder: Path, **how: Any) -> Any:
    """A random model, written to `folder` by transformers."""
    model = random_model(case)
    model.save_pretrained(folder, **how)
    return model


def weights_of(source: Source, kind: str = "weight") -> dict[str, Tensor]:
    """All tensors of a source by canonical name."""
    return {spec.name: source.read(kind, spec.name) for spec in param_table(source.config.model)}


def stage_of(source: Source) -> GPTStage:
    """Our model with the weights of a source, on this process."""
    parts = build_model(source.config, Mesh.single())
    parts.weights.load(weights_of(source))
    return parts.stage


@torch.no_grad()
def our_logits(source: Source, tokens: Tensor) -> Tensor:
    """Token ids (B, S) -> logits (B, S, V)."""
    logits: Tensor = stage_of(source)(tokens.t())
    return logits.transpose(0, 1)[..., : source.config.model.vocab_size]


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor) -> Tensor:
    """Token ids (B, S) -> logits (B, S, V)."""
    logits: Tensor = model(input_ids=tokens).logits
    return logits


def tokens_for(config: Config, batch: int = 1) -> Tensor:
    """Random ids (B, S) as long as the model's samples."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.model.vocab_size, (batch, config.model.seq_length), generator=generator)


def native(model: ModelConfig = toy.LLAMA, dtype: torch.dtype = torch.float32, **changes: Any) -> Memory:
    """Random weights of a model of ours."""
    config = resolve(Config(model=replace(model, **changes)), world_size=1)
    return Memory(config, {"weight": toy.random_weights(config.model, dtype)})
