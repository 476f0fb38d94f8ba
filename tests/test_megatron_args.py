"""Megatron-LM's settings: each is honoured, known to change nothing, or refused by name."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron3d.config import Config, ConfigError, ModelConfig, RopeScaling
from megatron3d.megatron_args import ONLY, args_of, model_of
from megatron3d.megatron_files import MegatronSource
from megatron3d.megatron_write import write_megatron
from megatron3d.validate import resolve
from tests.megatron import (
    GPT2,
    LLAMA,
    SETTINGS,
    State,
    assert_same,
    fixture_weights,
    put,
    random_source,
    states,
    weights,
)


@pytest.mark.parametrize("model", SETTINGS.values(), ids=SETTINGS)
def test_settings_go_there_and_back(model: ModelConfig) -> None:
    model = resolve(Config(model=model), world_size=1).model
    assert resolve(Config(model=model_of(args_of(model), None)), world_size=1).model == model


def test_gelu_is_the_one_that_megatron_computes() -> None:
    """Its fusion of GELU with the bias is the tanh form, and is in force only where there are biases."""
    args = args_of(GPT2)
    assert model_of(args | {"bias_gelu_fusion": True}, None).activation == "gelu_tanh"
    assert model_of(args | {"bias_gelu_fusion": True, "add_bias_linear": False}, None).activation == "gelu"
    assert model_of(args | {"bias_gelu_fusion": True, "swiglu": True}, None).activation == "swiglu"


def test_older_spellings() -> None:
    args = args_of(GPT2)
    for name in ("norm_epsilon", "position_embedding_type", "add_bias_linear", "normalization", "num_query_groups"):
        del args[name]
    old = args | {"layernorm_epsilon": 1e-3, "disable_bias_linear": True, "use_rotary_position_embeddings": True}
    expected = replace(GPT2, norm_epsilon=1e-3, bias="none", position_embedding="rope", num_query_groups=0)
    assert model_of(old, None) == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": 8}, "num_experts is 8 (what works is None or 0)"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({"rotary_seq_len_interpolation_factor": 4}, "rotary_seq_len_interpolation_factor is 4"),
        ({"position_embedding_type": "none"}, "position_embedding_type is 'none' (what works is learned_absolute or"),
        ({"position_embedding_type": "mrope"}, "position_embedding_type is 'mrope'"),
        ({"squared_relu": True}, "squared_relu is True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p is True"),
        ({"multi_latent_attention": True, "num_experts": 2}, "num_experts is 2"),
        ({"multi_latent_attention": True, "num_experts": 2}, "multi_latent_attention is True"),
        ({"window_size": (128, 0)}, "window_size is (128, 0)"),
        ({"spec": ["a.module", "a_function"]}, "spec is ['a.module', 'a_function']"),
        ({"normalization": "L2Norm"}, "normalization is 'L2Norm'"),
        ({"qk_layernorm": True, "normalization": "LayerNorm"}, "qk_layernorm goes with RMSNorm"),
        ({"hidden_size": "48"}, "hidden_size in its args must be int, not '48'"),
        ({"hidden_size": True}, "hidden_size in its args must be int"),
        ({"num_attention_heads": None}, "do not say num_attention_heads"),
        ({"num_attention_heads": -6}, "--num-attention-heads"),
        ({"vocab_size": None}, "Give the tokenizer's size with --vocab-size"),
        ({"num_layers": 5}, "has 4 layers (4 in its stages), but its args say num_layers 5"),
        ({"tensor_model_parallel_size": 2}, "args say tensor_model_parallel_size 2"),
        ({"kv_channels": 16}, "linear_qkv.weight has shape (80, 48), the model needs (160, 48)"),
        ({"padded_vocab_size": 512}, "output_layer.weight has shape (256, 48), the model needs (512, 48)"),
        ({"vocab_size": 300}, "embedding.word_embeddings.weight has shape (256, 48), the model needs (300, 48)"),
    ],
)
def test_settings_that_cannot_be_honoured(changes: State, told: str, tmp_path: Path) -> None:
    state = states("llama")["mp_rank_00"]
    state["args"] = Namespace(**{**vars(state["args"]), **changes})
    put(tmp_path, {"mp_rank_00": state})
    with pytest.raises(ConfigError) as caught:
        MegatronSource(tmp_path)
    assert told in str(caught.value) and str(tmp_path) in str(caught.value)


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    state = states("llama")["mp_rank_00"]
    more = {name: value for name, legal in ONLY.items() for value in legal}
    more |= {
        "apply_query_key_layer_scaling": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "init_method_std": 1,
    }
    state["args"] = Namespace(**{**vars(state["args"]), **more})
    source = MegatronSource(put(tmp_path, {"mp_rank_00": state}))
    assert source.config.model == replace(LLAMA, dropout=0.1, init_std=1.0)
    assert ["attention_dropout is 0.1" in note for note in source.notes] == [True]


def test_vocabulary_given_by_the_caller(tmp_path: Path) -> None:
    state = states("gpt2")["mp_rank_00"]
    state["args"].vocab_size = None
    put(tmp_path, {"mp_rank_00": state})
    assert_same(weights(MegatronSource(tmp_path, vocab_size=131)), fixture_weights("gpt2"))
    assert MegatronSource(tmp_path, vocab_size=256).read("weight", "embedding.word.weight").shape == (256, 48)
    state["args"].vocab_size, state["args"].tokenizer_type = 130, "NullTokenizer"
    put(tmp_path / "null", {"mp_rank_00": state})
    assert MegatronSource(tmp_path / "null").config.model.vocab_size == 131


@pytest.mark.parametrize("number", [-1, 1 << 62])
@pytest.mark.parametrize("name", ["iteration", "consumed_train_samples"])
def test_counts_that_no_run_has_come_to(name: str, number: int, tmp_path: Path) -> None:
    """A checkpoint made of them could not be read."""
    state = states("llama")["mp_rank_00"]
    if name == "iteration":
        state[name] = number
    else:
        setattr(state["args"], name, number)
    put(tmp_path, {"mp_rank_00": state})
    with pytest.raises(ConfigError, match=f"{name} {number}, which no run has come to"):
        MegatronSource(tmp_path)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (replace(GPT2, activation="gelu_tanh", bias="none"), "tanh form of GELU"),
        (replace(GPT2, qk_norm=True), "qk_layernorm goes with RMSNorm"),
        (
            replace(
                LLAMA,
                rope_scaling=RopeScaling(
                    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=4096
                ),
            ),
            "original_max_position 8192, the model 1.0, 4.0 and 4096",
        ),
    ],
)
def test_models_that_megatron_cannot_express(model: ModelConfig, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_megatron(random_source(model), tmp_path / "a", tp=1, pp=1)
    assert told in str(caught.value) and not any(tmp_path.iterdir())
