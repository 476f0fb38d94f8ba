"""Megatron-LM's checkpoints: what megatron-core itself wrote is read to the bit and computes its logits, under
any names and any split of layers; what is not whole or does not fit is refused by name."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron3d.config import ConfigError
from megatron3d.megatron_files import MegatronSource
from megatron3d.megatron_lm import engine_name, local_name
from megatron3d.megatron_stored import Whole
from megatron3d.mesh import Mesh
from megatron3d.trainer import build_model
from tests.megatron import (
    FIXTURES,
    FOLDERS,
    GPT2,
    LLAMA,
    MODELS,
    State,
    assert_same,
    fixture_weights,
    put,
    states,
    weights,
)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_of_megatron_core(model: str, folder: str) -> None:
    source = MegatronSource(FIXTURES / model / folder)
    assert source.config.model == (LLAMA if model == "llama" else GPT2)
    assert source.meta == {"step": 7, "consumed_samples": 56} and source.notes == ()
    parts = build_model(source.config, Mesh.single())
    parts.weights.load(weights(source))
    expected = load_file(FIXTURES / model / "expected.safetensors")
    with torch.no_grad():
        logits = parts.stage(expected["tokens"].t())[..., : source.config.model.vocab_size].transpose(0, 1)
    assert logits.std() > 0.1 and (logits - expected["logits"]).abs().max() < 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_all_folders_of_a_model_hold_the_same(model: str) -> None:
    expected = fixture_weights(model)
    assert expected["embedding.word.weight"].shape == (131, 48)
    for folder in FOLDERS:
        assert_same(weights(MegatronSource(FIXTURES / model / folder)), expected)


@pytest.mark.parametrize("folder", FOLDERS)
def test_tensors_have_memory_of_their_own_in_any_order(folder: str) -> None:
    source = MegatronSource(FIXTURES / "llama" / folder)
    expected = weights(source)
    for name in [*reversed(expected), "layers.0.mlp.up.weight", "layers.0.mlp.up.weight"]:
        tensor = source.read("weight", name)
        assert torch.equal(tensor, expected[name]) and source.dtype("weight", name) == tensor.dtype
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    with pytest.raises(KeyError):
        source.read("master", "head.norm.weight")


def test_fused_tensors_are_read_once_and_threads_may_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, ...]] = []
    fill = Whole.fill
    monkeypatch.setattr(Whole, "fill", lambda self, pieces: (reads.append(self.shape), fill(self, pieces))[1])
    source = MegatronSource(FIXTURES / "llama" / "legacy_tp2_pp2")
    expected = weights(source)
    assert len(reads) == 3 + 4 * 6 < len(expected)  # 3 beside the layers, and 6 in each
    with ThreadPoolExecutor(8) as threads:
        names = [*expected] * 4
        for name, tensor in zip(names, threads.map(lambda name: source.read("weight", name), names), strict=True):
            assert torch.equal(tensor, expected[name])


def test_the_folder_of_an_iteration_is_read_too(tmp_path: Path) -> None:
    expected = fixture_weights("gpt2")
    inner = FIXTURES / "gpt2" / "legacy_tp2_pp2" / "iter_0000007"
    assert_same(weights(MegatronSource(inner)), expected)
    shutil.copytree(inner, tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_same(weights(MegatronSource(tmp_path)), expected)


def renamed(state: State, rename: Callable[[str], str]) -> State:
    return {**state, "model": {rename(name): tensor for name, tensor in state["model"].items()}}


@pytest.mark.parametrize("model", MODELS)
def test_names_of_transformer_engine(model: str, tmp_path: Path) -> None:
    files = {rank: renamed(state, engine_name) for rank, state in states(model, "legacy_tp2_pp2").items()}
    names = {name for state in files.values() for name in state["model"]}
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names
    for state in files.values():
        state["model"]["decoder.layers.0.self_attention.core_attention._extra_state"] = torch.zeros(
            3, dtype=torch.uint8
        )
    assert_same(weights(MegatronSource(put(tmp_path, files))), fixture_weights(model))


def classic(state: State) -> State:
    """The names and the nesting of the model before megatron-core."""
    words = {
        "decoder.final_layernorm": "encoder.final_norm",
        "decoder.layers": "encoder.layers",
        "input_layernorm": "input_norm",
        "pre_mlp_layernorm": "post_attention_norm",
        "linear_qkv": "query_key_value",
        "linear_proj": "dense",
        "linear_fc1": "dense_h_to_4h",
        "linear_fc2": "dense_4h_to_h",
    }
    model: dict[str, Any] = {"embedding": {"word_embeddings": {}, "position_embeddings": {}}, "encoder": {}}
    for name, tensor in state["model"].items():
        if tensor is None:
            continue
        for theirs, old in words.items():
            name = name.replace(theirs, old)
        first, _, rest = name.partition(".")
        place, key = (model[first], rest) if first in model else (model.setdefault("output_layer", {}), rest)
        if first == "embedding":
            place, key = place[rest.partition(".")[0]], "weight"
        place[key] = tensor
    return {**state, "model": {"language_model": model}}


@pytest.mark.parametrize("model", MODELS)
def test_names_of_the_classic_model(model: str, tmp_path: Path) -> None:
    state = classic(states(model)["mp_rank_00"])
    assert "layers.3.self_attention.query_key_value.weight" in state["model"]["language_model"]["encoder"]
    assert_same(weights(MegatronSource(put(tmp_path / "a", {"mp_rank_00": state}))), fixture_weights(model))
    put(tmp_path / "b", {"mp_rank_00": {**state, "checkpoint_version": 1.0}})
    with pytest.raises(ConfigError, match=r"checkpoint_version 1\.0"):
        MegatronSource(tmp_path / "b")


def split_layers(state: State, layers: Mapping[str, tuple[int, ...]]) -> dict[str, State]:
    """Rank folder + chunk key ("mp_rank_00_000/model0") -> its layers; ends go to the first and to the last layer."""
    files: dict[str, State] = {}
    pp = len({name.partition("/")[0] for name in layers})
    for place, held in layers.items():
        rank, _, key = place.partition("/")
        args = Namespace(**{**vars(state["args"]), "pipeline_model_parallel_size": pp})
        chunk = files.setdefault(rank, {**{k: v for k, v in state.items() if k != "model"}, "args": args})
        chunk[key] = {}
        for name, tensor in state["model"].items():
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                if int(number) in held:
                    chunk[key][f"decoder.layers.{held.index(int(number))}.{rest}"] = tensor
            elif (0 if name.startswith("embedding") else 3) in held:
                chunk[key][name] = tensor
    return files


UNEVEN = {"mp_rank_00_000/model": (0, 1, 2), "mp_rank_00_001/model": (3,)}
VIRTUAL = {
    "mp_rank_00_000/model0": (0,),
    "mp_rank_00_001/model0": (1,),
    "mp_rank_00_000/model1": (2,),
    "mp_rank_00_001/model1": (3,),
}


@pytest.mark.parametrize("layers", [UNEVEN, VIRTUAL], ids=["uneven", "virtual"])
def test_splits_of_layers(layers: Mapping[str, tuple[int, ...]], tmp_path: Path) -> None:
    files = split_layers(states("llama")["mp_rank_00"], layers)
    assert_same(weights(MegatronSource(put(tmp_path, files))), fixture_weights("llama"))


def test_state_of_an_optimizer_is_left_out_with_a_note(tmp_path: Path) -> None:
    state = states("llama")["mp_rank_00"]
    main = torch.zeros(3)
    main.partition_dim = 0  # type: ignore[attr-defined]
    state |= {"optimizer": {"fp32_from_fp16_params": [[main]]}, "rng_state": [{"torch": torch.get_rng_state()}]}
    source = MegatronSource(put(tmp_path / "a", {"mp_rank_00": state}))
    assert_same(weights(source), fixture_weights("llama"))
    assert any("optimizer" in note for note in source.notes)
    put(tmp_path / "b", {"mp_rank_00": states("llama")["mp_rank_00"]})
    (tmp_path / "b" / "mp_rank_00" / "distrib_optim.pt").touch()
    assert any("optimizer" in note for note in MegatronSource(tmp_path / "b").notes)


@pytest.mark.parametrize(
    "name", list(states("llama")["mp_rank_00"]["model"]) + list(states("gpt2")["mp_rank_00"]["model"])
)
def test_spellings_are_inverse(name: str) -> None:
    assert local_name(engine_name(name)) == name == local_name(name)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    state = states("llama")["mp_rank_00"]
    model = state["model"]
    del model["decoder.layers.2.mlp.linear_fc2.weight"]
    model["decoder.layers.0.self_attention.linear_proj.weight"] = torch.zeros(48, 40)
    model["decoder.layers.1.self_attention.linear_proj.bias"] = torch.zeros(48)
    model["decoder.final_layernorm.weight"] = torch.zeros(48, dtype=torch.int64)
    put(tmp_path, {"mp_rank_00": state})
    with pytest.raises(ConfigError) as caught:
        MegatronSource(tmp_path)
    for told in (
        "decoder.layers.2.mlp.linear_fc2.weight is missing",
        "decoder.layers.0.self_attention.linear_proj.weight has shape (48, 40), the model needs (48, 48)",
        "decoder.layers.1.self_attention.linear_proj.bias of shape (48,) is not expected",
        "decoder.final_layernorm.weight has values of type torch.int64",
    ):
        assert told in str(caught.value)


def test_copies_must_agree(tmp_path: Path) -> None:
    files = states("gpt2", "legacy_tp2_pp2")
    files["mp_rank_01_000"]["model"]["decoder.layers.1.mlp.linear_fc2.bias"][3] += 1
    files["mp_rank_01_001"]["model"]["output_layer.weight"][2] += 1
    source = MegatronSource(put(tmp_path, files))
    for name, told in (
        ("layers.1.mlp.down.bias", r"linear_fc2\.bias in .*mp_rank_01_000.* is a copy"),
        ("embedding.word.weight", r"output_layer\.weight in .* is a copy"),
    ):
        with pytest.raises(ConfigError, match=told):
            source.read("weight", name)
    source.read("weight", "layers.0.mlp.down.bias")
    for rank in ("mp_rank_00_001", "mp_rank_01_001"):
        files[rank]["model"]["output_layer.weight"] = torch.zeros(64, 48)
    put(tmp_path / "other", files)
    with pytest.raises(
        ConfigError, match=r"output_layer\.weight has shape \(128, 48\) and type torch\.float32, but args"
    ):
        MegatronSource(tmp_path / "other")


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    files = states("llama", "legacy_tp2_pp2")
    for missing, told in (("mp_rank_01_001", "none of mp_rank_01_001"), ("mp_rank_00_000", "none of mp_rank_00_000")):
        put(tmp_path / missing, {rank: state for rank, state in files.items() if rank != missing})
        with pytest.raises(ConfigError, match=told):
            MegatronSource(tmp_path / missing)
    (tmp_path / "mp_rank_00_000" / "mp_rank_00_000").mkdir()
    with pytest.raises(ConfigError, match=r"mp_rank_00_000.model_optim_rng\.pt cannot be read: FileNotFoundError"):
        MegatronSource(tmp_path / "mp_rank_00_000")
    (tmp_path / "experts" / "mp_rank_00_000_001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="experts are not built"):
        MegatronSource(tmp_path / "experts")
    del files["mp_rank_01_000"]["model"]["decoder.layers.0.input_layernorm.weight"]
    put(tmp_path / "uneven", files)
    with pytest.raises(ConfigError, match=r"only one has decoder\.layers\.0\.input_layernorm\.weight"):
        MegatronSource(tmp_path / "uneven")


def test_folders_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no latest_checkpointed_iteration\.txt"):
        MegatronSource(tmp_path)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("../..")
    with pytest.raises(ConfigError, match="must hold the number of an iteration"):
        MegatronSource(tmp_path)
    tracker.write_text("12")
    with pytest.raises(ConfigError, match=r"names iter_0000012, but there is no folder"):
        MegatronSource(tmp_path)
    (tmp_path / "iter_0000012").mkdir()
    with pytest.raises(ConfigError, match="holds neither"):
        MegatronSource(tmp_path)
    put(tmp_path / "list", {"mp_rank_00": []})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="it is no dictionary"):
        MegatronSource(tmp_path / "list")
    put(tmp_path / "without", {"mp_rank_00": {"model": {}}})
    with pytest.raises(ConfigError, match="it has no args"):
        MegatronSource(tmp_path / "without")
