"""Writing for Megatron-LM: files as megatron-core writes them, whole or not at all, that read back to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron3d import shelf
from megatron3d.config import ConfigError
from megatron3d.megatron_cut import Plan, shares
from megatron3d.megatron_files import MegatronSource
from megatron3d.megatron_lm import shared_tensors
from megatron3d.megatron_write import write_megatron
from megatron3d.params import param_table
from tests.megatron import (
    FILE,
    FIXTURES,
    GPT2,
    LLAMA,
    MODELS,
    SETTINGS,
    assert_same,
    fixture_weights,
    put,
    random_source,
    states,
    weights,
)
from tests.memory import Memory
from tools import convert_checkpoint


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_written_folders_read_back(model: str, tp: int, pp: int, tmp_path: Path) -> None:
    source = MegatronSource(FIXTURES / model / "torch_dist_tp2_pp2")
    told: list[tuple[int, int]] = []
    folder = write_megatron(source, tmp_path / "out", tp=tp, pp=pp, progress=lambda *done: told.append(done))
    size = sum(path.stat().st_size for path in (tmp_path / "out" / "iter_0000007").rglob(FILE))
    assert (
        folder == tmp_path / "out" and told[0][0] == 0 and told[-1][0] == told[-1][1] and 0.7 < told[-1][1] / size < 1
    )
    back = MegatronSource(tmp_path / "out")
    assert (back.config, back.meta) == (source.config, source.meta)
    assert_same(weights(back), fixture_weights(model))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("folder", ["legacy_tp1_pp1", "legacy_tp2_pp2"])
@pytest.mark.parametrize("model", MODELS)
def test_written_files_are_those_of_megatron_core(model: str, folder: str, tmp_path: Path) -> None:
    """All names, values and settings; rows that pad the vocabulary are zero here, random there."""
    tp, pp = int(folder[9]), int(folder[13])
    write_megatron(MegatronSource(FIXTURES / model / folder), tmp_path / "out", tp=tp, pp=pp)
    expected = states(model, folder)
    found = {path.parent.name: torch.load(path, weights_only=False) for path in (tmp_path / "out").glob(f"*/*/{FILE}")}
    assert found.keys() == expected.keys()
    for rank, state in expected.items():
        mine = found[rank]
        assert mine["checkpoint_version"] == state["checkpoint_version"] and mine["iteration"] == 7
        assert vars(mine["args"]) | vars(state["args"]) == vars(mine["args"])
        assert mine["model"].keys() == state["model"].keys()
        for name, tensor in state["model"].items():
            if "word_embeddings" in name or "output_layer.weight" in name:
                first = int(rank[8:10]) * len(tensor)
                real = max(0, min(len(tensor), 131 - first))
                assert torch.equal(mine["model"][name][:real], tensor[:real]), name
                assert not mine["model"][name][real:].any() and mine["model"][name].shape == tensor.shape
            else:
                assert tensor is mine["model"][name] is None or torch.equal(mine["model"][name], tensor), name


@pytest.mark.parametrize("settings", ["qwen2", "qwen3", "tanh"])
def test_other_models_read_back_in_their_own_type(settings: str, tmp_path: Path) -> None:
    source = random_source(SETTINGS[settings])
    folder = write_megatron(source, tmp_path / "out", tp=2, pp=4, transformer_engine=True)
    state = torch.load(folder / "release" / "mp_rank_01_003" / FILE, weights_only=False)
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in state["model"]
    assert (state["args"].bf16, state["args"].params_dtype) == (True, torch.bfloat16)
    back = MegatronSource(tmp_path / "out")
    assert back.config.model == source.config.model
    assert_same(weights(back), source.tensors["weight"])


def test_types_that_are_asked_for_come_from_the_masters(tmp_path: Path) -> None:
    source = random_source(LLAMA, {"step": 12, "consumed_samples": 34})
    source.tensors["master"] = {name: tensor.float() + 1e-6 for name, tensor in source.tensors["weight"].items()}
    write_megatron(source, tmp_path / "exact", tp=1, pp=1, dtype=torch.float32)
    assert_same(weights(MegatronSource(tmp_path / "exact")), source.tensors["master"])
    write_megatron(source, tmp_path / "half", tp=1, pp=1, dtype=torch.float16)
    back = MegatronSource(tmp_path / "half")
    assert back.meta == {"step": 12, "consumed_samples": 34}
    assert_same(weights(back), {name: tensor.half() for name, tensor in source.tensors["master"].items()})


@pytest.mark.parametrize(
    ("tp", "pp", "told"),
    [
        (4, 1, "--tp 4 does not divide --num-attention-heads 6, --num-query-groups 2 and --ffn-hidden-size 80"),
        (3, 1, "It can be 1 or 2."),
        (1, 3, "--pp 3 does not divide --num-layers 4, as Megatron-LM needs it to. It can be 1, 2 or 4."),
        (0, 1, "--tp 0"),
    ],
)
def test_layouts_that_do_not_divide(tp: int, pp: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_megatron(random_source(LLAMA), tmp_path / "out", tp=tp, pp=pp)
    assert told in str(caught.value) and not any(tmp_path.iterdir())


COMPARED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "add_position_embedding",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
    "tokenizer_type",
    "data_parallel_random_init",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
"""What Megatron-LM compares with its own arguments when it loads, some of it only if it was given --vocab-file."""


def args_in(folder: Path) -> dict[str, Any]:
    """The args in the first file of a folder."""
    return vars(torch.load(min(folder.rglob(FILE)), weights_only=False)["args"])


def test_all_that_megatron_compares_is_said(tmp_path: Path) -> None:
    write_megatron(random_source(GPT2), tmp_path / "out", tp=2, pp=1)
    args = args_in(tmp_path / "out")
    assert [name for name in COMPARED if args.get(name) is None] == []
    assert (args["tokenizer_type"], args["vocab_size"], args["padded_vocab_size"]) == ("GPT2BPETokenizer", 131, 256)


@pytest.mark.parametrize(("kind", "said"), [("NullTokenizer", 130), ("HuggingFaceTokenizer", 131)])
def test_the_tokenizer_of_a_checkpoint_of_megatron_stays_its_own(kind: str, said: int, tmp_path: Path) -> None:
    """The null one counts the end of documents apart."""
    state = states("gpt2")["mp_rank_00"]
    state["args"].tokenizer_type, state["args"].vocab_size = kind, said
    put(tmp_path / "came", {"mp_rank_00": state})
    convert_checkpoint.main(["--load", str(tmp_path / "came"), "--save", str(tmp_path / "went"), "--to", "megatron"])
    assert (args_in(tmp_path / "went")["tokenizer_type"], args_in(tmp_path / "went")["vocab_size"]) == (kind, said)
    assert MegatronSource(tmp_path / "went").config.model.vocab_size == 131


def test_shares_are_views_of_what_was_read() -> None:
    """A rank's part takes no memory of its own: columns, fused rows, and a padded vocabulary but for its zeros."""

    class Given(Memory):
        def read(self, kind: str, name: str) -> Tensor:
            return self.tensors[kind][name]

    whole = random_source(replace(LLAMA, num_query_groups=6))
    specs = {spec.name: spec for spec in param_table(whole.config.model)}
    tensors = shared_tensors(whole.config.model, 2)
    plan = Plan(Given(whole.config, whole.tensors), specs, tensors, 2, 1, None, False)
    ours = {tensor.untyped_storage().data_ptr() for tensor in whole.tensors["weight"].values()}
    for shared in tensors:
        parts = [part for rank in shares(plan, shared) for part in rank]
        new = [part for part in parts if part.untyped_storage().data_ptr() not in ours]
        assert sum(len(part) for part in new) == (256 - 131 if shared.padded else 0), shared.foreign.name
        assert not any(part.any() for part in new)


def test_a_folder_is_on_the_disk_when_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, each folder's list of names, and after the renaming that of the parent."""
    synced: list[tuple[Path, bool]] = []
    sync = shelf.sync
    monkeypatch.setattr(shelf, "sync", lambda path: (synced.append((path, (tmp_path / "out").exists())), sync(path)))
    write_megatron(random_source(LLAMA), tmp_path / "out", tp=2, pp=2)
    aside = tmp_path / ".out.partial"
    before = {aside, *(aside / path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*"))}
    assert {path for path, done in synced if not done} == before
    assert [path for path, done in synced if done] == [tmp_path]


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_megatron(random_source(LLAMA), out, tp=1, pp=1)  # an empty folder is no obstacle
    before = sorted(out.rglob("*"))
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_megatron(random_source(GPT2), out, tp=1, pp=1)
    assert sorted(out.rglob("*")) == before

    class Interrupted(Memory):
        def read(self, kind: str, name: str) -> Tensor:
            if name.startswith("layers.3"):
                raise OSError("the disk is gone")
            return super().read(kind, name)

    whole = random_source(LLAMA)
    with pytest.raises(ConfigError, match="other failed: the disk is gone"):
        write_megatron(Interrupted(whole.config, whole.tensors), tmp_path / "other", tp=1, pp=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
