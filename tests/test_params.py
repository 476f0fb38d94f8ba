"""The parameter table against counts and lists written down independently."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron3d.config import ModelConfig
from megatron3d.params import (
    ParamSpec,
    all_sites,
    kv_heads_split,
    num_parameters,
    param_table,
    stage_sites,
)
from megatron3d.schedule import split_layers
from megatron3d.sizes import resolve_model
from tests import toy

LLAMA = resolve_model(toy.LLAMA)
GPT2 = resolve_model(toy.GPT2)
QWEN = resolve_model(replace(toy.LLAMA, bias="qkv", qk_norm=True, tied_embeddings=True, head_dim=24))
MQA = resolve_model(replace(toy.GPT2, num_query_groups=1, bias="none", tied_embeddings=False, activation="gelu"))
MODELS = {"llama": LLAMA, "gpt2": GPT2, "qwen": QWEN, "mqa": MQA}


def hand_count(model: ModelConfig) -> int:
    """Parameters of a decoder, added up from its shape."""
    h, f, v = model.hidden_size, model.ffn_hidden_size, model.vocab_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_query_groups * model.head_dim
    norm = h * (2 if model.normalization == "layernorm" else 1)
    matrices = h * q + 2 * h * kv + q * h + (3 if model.activation == "swiglu" else 2) * h * f
    wide = f * (2 if model.activation == "swiglu" else 1)
    biases = {"none": 0, "qkv": q + 2 * kv, "all": q + 2 * kv + h + wide + h}[model.bias]
    head_norms = 2 * model.head_dim * (2 if model.normalization == "layernorm" else 1) if model.qk_norm else 0
    layer = matrices + biases + head_norms + 2 * norm
    positions = model.max_position * h if model.position_embedding == "learned" else 0
    return v * h * (1 if model.tied_embeddings else 2) + positions + model.num_layers * layer + norm


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_number_of_parameters(model: ModelConfig) -> None:
    assert num_parameters(param_table(model)) == hand_count(model)


def test_rows_of_a_layer() -> None:
    names = [spec.name.removeprefix("layers.1.") for spec in param_table(QWEN) if spec.name.startswith("layers.1.")]
    assert names == [
        "attention_norm.weight",
        "attention.query.weight",
        "attention.query.bias",
        "attention.key.weight",
        "attention.key.bias",
        "attention.value.weight",
        "attention.value.bias",
        "attention.query_norm.weight",
        "attention.key_norm.weight",
        "attention.output.weight",
        "mlp_norm.weight",
        "mlp.gate.weight",
        "mlp.up.weight",
        "mlp.down.weight",
    ]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_table_is_the_same_on_every_layout(model: ModelConfig) -> None:
    """Only `partial`, and whether keys and values are split, may depend on tp and sp."""
    base = param_table(model)
    assert len({spec.name for spec in base}) == len(base)
    for tp in (1, 2, 3, 4):
        for sp in (False, True):
            for mine, spec in zip(param_table(model, tp=tp, sp=sp), base, strict=True):
                assert replace(mine, partial=spec.partial, shard=spec.shard) == spec
                is_key_value = ".key." in spec.name or ".value." in spec.name
                split = dict(spec.shard) if not is_key_value or kv_heads_split(model, tp) else {}
                assert dict(mine.shard) == split


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_matrices_decay_and_nothing_else(model: ModelConfig) -> None:
    """GRP-13: a norm weight or a bias is never in the decay group, whatever the class of the norm."""
    for spec in param_table(model):
        assert spec.decay == (len(spec.shape) == 2), spec.name
        assert spec.decay == (spec.init == "normal"), spec.name
        assert ("norm" in spec.name or spec.name.endswith("bias")) == (not spec.decay), spec.name


def partial_names(table: list[ParamSpec]) -> set[str]:
    """Parameters with partial gradients, layers taken together."""
    return {spec.name.replace("layers.0.", "") for spec in table if spec.partial and "layers.1" not in spec.name}


def test_partial_gradients() -> None:
    """What a rank computes only a part of: stated, not derived."""
    two = {name: replace(model, num_layers=2) for name, model in MODELS.items()}
    norms = {"attention_norm.weight", "mlp_norm.weight", "head.norm.weight"}
    norm_biases = {name.replace("weight", "bias") for name in norms}
    row_biases = {"attention.output.bias", "mlp.down.bias"}
    head_norms = {"attention.query_norm.weight", "attention.key_norm.weight"}
    keys_values = {f"attention.{part}.{kind}" for part in ("key", "value") for kind in ("weight", "bias")}
    keys_values_weights = {name for name in keys_values if name.endswith("weight")}
    positions = {"embedding.position.weight"}

    def found(name: str, tp: int, sp: bool) -> set[str]:
        return partial_names(param_table(two[name], tp=tp, sp=sp))

    for name in MODELS:
        assert found(name, 1, False) == found(name, 1, True) == set()
    assert found("llama", 2, False) == set()
    assert found("llama", 2, True) == norms
    assert found("llama", 4, True) == norms | keys_values_weights
    assert found("gpt2", 2, True) == norms | norm_biases | row_biases | positions
    assert found("qwen", 2, False) == head_norms
    assert found("qwen", 4, True) == norms | head_norms | keys_values
    assert found("mqa", 2, False) == keys_values_weights


def test_tied_matrix_has_two_sites() -> None:
    tied = [spec for spec in param_table(GPT2) if len(spec.sites) > 1]
    assert [(spec.name, spec.sites) for spec in tied] == [("embedding.word.weight", ("embedding", "head"))]
    assert all(len(spec.sites) == 1 for spec in param_table(LLAMA))


def test_stages_hold_every_site_once() -> None:
    """DIV-01: 5 layers on 2 stages are 5 layers, and so on for every uneven split."""
    for layers in range(1, 9):
        model = replace(LLAMA, num_layers=layers)
        for pp in range(1, layers + 1):
            split = split_layers(layers, pp)
            assert sum(split) == layers and max(split) - min(split) <= 1
            assert [s for stage in range(pp) for s in stage_sites(split, stage)] == all_sites(model)
    assert stage_sites((1, 4), 0) == ["embedding", "layers.0"]
    assert stage_sites((1, 4), 1) == ["layers.1", "layers.2", "layers.3", "layers.4", "head"]


def test_residual_matrices_start_smaller() -> None:
    """Those that end in the residual stream: init_std / sqrt(2 layers)."""
    for spec in param_table(LLAMA):
        if spec.init == "normal":
            residual = spec.name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert spec.std == pytest.approx(0.02 / (8**0.5) if residual else 0.02)
