"""Hugging Face folders both ways: the function of transformers, byte-equal tensors, memory, folders that do not fit."""

from __future__ import annotations

import json
import shutil
import struct
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron3d import shelf
from megatron3d.comm import gather_objects
from megatron3d.config import Config, ConfigError, ParallelConfig, RopeScaling
from megatron3d.convert import write_native
from megatron3d.data import IGNORE
from megatron3d.huggingface_files import HuggingFaceSource, write_huggingface
from megatron3d.inference import sample
from megatron3d.mesh import Mesh
from megatron3d.params import param_table
from megatron3d.sources import open_source
from megatron3d.trainer import build_model
from megatron3d.validate import resolve
from tests import hf, toy
from tests.ranks import on_mesh
from tools import convert_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each case, written by transformers."""
    root = tmp_path_factory.mktemp("hf")
    for case in hf.CASES:
        hf.saved(case, root / case)
    return {case: root / case for case in hf.CASES}


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by the safetensors library."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def loaded(folder: Path) -> Any:
    """The folder as transformers loads it, which must find exactly its tensors."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def edited(folder: Path, target: Path, **fields: Any) -> Path:
    """A copy of a folder with other fields in its config.json."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return target


# The function ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", hf.CASES)
def test_logits_equal_those_of_transformers(case: str, folders: dict[str, Path]) -> None:
    """CONV-03, CONV-05: kv heads 12, 2, 1 of 12, with and without biases, tied or not, up to position 2,047."""
    source = HuggingFaceSource(folders[case])
    tokens = hf.tokens_for(source.config, batch=1 if source.config.model.seq_length > 100 else 3)
    theirs = hf.their_logits(hf.random_model(case), tokens)
    assert theirs.std() > 0.2, "logits near zero would agree anyway"
    assert (hf.our_logits(source, tokens) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["gpt2-untied", "llama-mqa-tied", "llama3", "mistral", "qwen2", "qwen3-mqa-tied"])
def test_greedy_generation_gives_the_same_tokens(case: str, folders: dict[str, Path]) -> None:
    """CONV-06: and no id beyond the vocabulary."""
    prompt = [11, 60, 4, 99]
    stage = hf.stage_of(HuggingFaceSource(folders[case]))
    ours = list(sample(stage, prompt, tokens=20, temperature=0, top_k=0, seed=0))
    model = hf.random_model(case)
    theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None)
    assert ours == theirs[0, len(prompt) :].tolist()
    assert max(ours) < 131


def layout_logits(mesh: Mesh, config: Config, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """This rank's part of the logits, (S, B, V / tp); hidden states travel as objects."""
    parts = build_model(config, mesh)
    parts.weights.load(weights)
    x = tokens.t()
    with torch.no_grad():
        for stage in range(mesh.pp.size):
            mine: Tensor = parts.stage(x) if mesh.pp.rank == stage else x
            at = mesh.grid.groups("pp")[0][stage]
            hidden = gather_objects(mine, mesh.control)[at]
            x = hidden if mesh.pp.rank != stage else mine
    return mine


class Imported(NamedTuple):
    """A model of a family, imported, and what transformers computes with it over its whole context."""

    config: Config
    weights: dict[str, Tensor]
    tokens: Tensor
    logits: Tensor


FAMILIES = ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Imported]:
    """Every family, tied and not, with a context of 2,048."""
    root, found = tmp_path_factory.mktemp("families"), {}
    for case in FAMILIES:
        for tied in (True, False):
            name, (family, settings) = f"{case}, {'tied' if tied else 'untied'}", hf.CASES[case]
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(hf.CASES, name, (family, {**settings, "tie_word_embeddings": tied}))
                model = hf.saved(name, root / name)
            source = HuggingFaceSource(root / name)
            assert source.config.model.seq_length == 2048 and source.config.model.tied_embeddings == tied
            tokens = hf.tokens_for(source.config)
            found[name] = Imported(source.config, hf.weights_of(source), tokens, hf.their_logits(model, tokens))
    return found


def all_logits(mesh: Mesh, models: list[tuple[Config, dict[str, Tensor], Tensor]]) -> list[Tensor]:
    """This rank's part of the logits of each model."""
    return [layout_logits(mesh, *model) for model in models]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_an_imported_model_computes_the_same_on_any_layout(tp: int, pp: int, families: dict[str, Imported]) -> None:
    """Each family over 2,048 positions; tp 2 splits the two key/value heads, pp 2 a tied embedding."""
    parallel = ParallelConfig(tp=tp, pp=pp, dp=1, sp=False if tp > 1 else None)
    configs = [resolve(replace(one.config, parallel=parallel), world_size=tp * pp) for one in families.values()]
    models = [(config, one.weights, one.tokens) for config, one in zip(configs, families.values(), strict=True)]
    ranks = on_mesh(configs[0].parallel, all_logits, models)
    apart = {}
    for (name, one), *parts in zip(families.items(), *ranks[-tp:], strict=True):
        ours = torch.cat(parts, dim=-1).transpose(0, 1)[..., :131]
        assert ours.shape == one.logits.shape == (1, 2048, 131) and one.logits.std() > 0.2
        apart[name] = float((ours - one.logits).abs().max())
    assert len(apart) == 12 and max(apart.values()) < 1e-4, apart


def first_losses(source: HuggingFaceSource, *layouts: dict[str, int]) -> list[float]:
    """Loss of the first step of a run from imported weights, on each layout."""
    return [
        toy.train(toy.config(source.config.model, **layout), steps=1, weights=hf.weights_of(source)).losses[0]
        for layout in layouts
    ]


def test_the_first_loss_of_training_is_theirs_on_every_layout(folders: dict[str, Path]) -> None:
    """Dropout comes from config.json, here none, whatever tp and pp are."""
    source = HuggingFaceSource(folders["llama-mqa-tied"], seq_length=24)
    tokens, labels = toy.global_batch(source.config.model, 0, 12)
    logits = hf.their_logits(hf.random_model("llama-mqa-tied"), tokens)
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE).item()
    layouts = [{"tp": tp, "pp": pp} for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2))]
    assert first_losses(source, *layouts) == pytest.approx([theirs] * 4, rel=1e-5)


def test_a_tied_import_on_several_stages_has_the_same_loss(folders: dict[str, Path]) -> None:
    """CONV-08: bit-equal."""
    source = HuggingFaceSource(folders["gpt2"], seq_length=24)
    one, two, four = first_losses(replace_dropout(source), {"pp": 1}, {"pp": 2}, {"pp": 4})
    assert one == two == four


def replace_dropout(source: HuggingFaceSource) -> Any:
    """The source without dropout in training."""
    model = replace(source.config.model, dropout=0.0)
    return hf.Memory(replace(source.config, model=model), {"weight": hf.weights_of(source)})


# There and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", hf.CASES)
def test_round_trip_is_equal_to_the_last_bit(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """CONV-09: tensors, names, tied or not; transformers loads the export and has the config it wrote."""
    before, after = folders[case], tmp_path / "out"
    write_huggingface(HuggingFaceSource(before), after, extras=before)
    wrote, read = stored(after), stored(before)
    assert wrote.keys() == read.keys()
    assert all(torch.equal(wrote[name].view(torch.int32), read[name].view(torch.int32)) for name in read)
    configs = [transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (before, after)]
    for config in configs:
        if config.get("n_inner", 0) is None:
            config["n_inner"] = 4 * config["n_embd"]  # we say it
        config.pop("_name_or_path", None)
    assert configs[0] == configs[1]
    loaded(after)
    assert (after / "generation_config.json").read_text() == (before / "generation_config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    hf.random_model("llama").to(dtype).save_pretrained(tmp_path / "a")
    source = HuggingFaceSource(tmp_path / "a")
    assert source.dtype("weight", "head.norm.weight") == dtype
    write_huggingface(source, tmp_path / "b")
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and b[name].dtype == dtype for name in a)
    assert loaded(tmp_path / "b").dtype == dtype


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_export_of_a_model_of_ours(family: str, tied: bool, tmp_path: Path) -> None:
    """CONV-06, CONV-09, DIV-04: 131 rows, tied as it is, the same function."""
    model = {"gpt2": toy.GPT2, "llama": toy.LLAMA, "qwen3": replace(toy.LLAMA, qk_norm=True, head_dim=24)}[family]
    source = hf.native(model, tied_embeddings=tied)
    write_huggingface(source, tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.config.model_type == family and model.config.tie_word_embeddings == tied
    assert model.config.vocab_size == 131 and len(model.get_input_embeddings().weight) == 131
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight) == tied
    tokens = hf.tokens_for(source.config, batch=2)
    assert (hf.their_logits(model, tokens) - hf.our_logits(source, tokens)).abs().max() < 1e-4


def test_every_field_of_the_config_is_the_run_s(tmp_path: Path) -> None:
    """CONV-16; and reading it back gives the same model, hence the same parameters under weight decay (GRP-14)."""
    scaling = RopeScaling(factor=4.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position=48)
    source = hf.native(
        rope_theta=500000.0, norm_epsilon=1e-6, max_position=96, init_std=0.01, head_dim=24, rope_scaling=scaling
    )
    write_huggingface(source, tmp_path / "out", token_ids=hf.IDS)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "initializer_range": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **hf.IDS,
    }
    assert {name: said.get(name) for name in expected} == expected
    theirs = loaded(tmp_path / "out")
    assert theirs.config.rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 48,
    }
    assert {name: getattr(theirs.generation_config, name) for name in hf.IDS} == hf.IDS
    back = HuggingFaceSource(tmp_path / "out", seq_length=32)
    assert back.config.model == source.config.model
    assert param_table(back.config.model) == param_table(source.config.model)


def test_token_ids_nobody_knows_are_null(tmp_path: Path) -> None:
    """Left out, transformers would take some family's: Llama's 2 ends a text."""
    notes = write_huggingface(hf.native(), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert "bos_token_id, eos_token_id and pad_token_id" in notes[0]
    with pytest.raises(ConfigError, match=r"eos_token_id 131.*0 to 130"):
        write_huggingface(hf.native(), tmp_path / "more", token_ids={"eos_token_id": 131})


def test_fp32_comes_from_the_masters(tmp_path: Path) -> None:
    """CONV-19: every tensor and the dtype as asked."""
    exact = hf.native().tensors["weight"]
    rough = {name: value.bfloat16() * 2 for name, value in exact.items()}  # not just rounded, to tell them apart
    source = hf.Memory(hf.native().config, {"weight": rough, "master": exact})
    kept = {None: rough, torch.bfloat16: rough, torch.float32: exact, torch.float16: exact}
    for dtype, values in kept.items():
        write_huggingface(source, tmp_path / str(dtype), dtype=dtype)
        wanted = dtype or torch.bfloat16
        back = HuggingFaceSource(tmp_path / str(dtype))
        assert all(torch.equal(back.read("weight", name), value.to(wanted)) for name, value in values.items())
        assert loaded(tmp_path / str(dtype)).dtype == wanted
    only_weights = hf.Memory(source.config, {"weight": rough})
    write_huggingface(only_weights, tmp_path / "widened", dtype=torch.float32)
    back = HuggingFaceSource(tmp_path / "widened")
    assert torch.equal(back.read("weight", "head.output.weight"), rough["head.output.weight"].float())


def test_shards_and_their_index(tmp_path: Path) -> None:
    source, seen = hf.native(), []
    write_huggingface(source, tmp_path / "a", shard_bytes=60_000, progress=lambda *counts: seen.append(counts))
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 3
    assert [path.name for path in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    total = sum(value.nbytes for value in stored(tmp_path / "a").values())
    assert index["metadata"]["total_size"] == total and seen[0] == (0, total) and seen[-1] == (total, total)
    for path in files:
        named = load_file(path)
        assert {name for name, file in index["weight_map"].items() if file == path.name} == named.keys()
        assert sum(value.nbytes for value in named.values()) <= 60_000 or len(named) == 1
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    write_huggingface(source, tmp_path / "b")
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()
    one, many = stored(tmp_path / "b"), stored(tmp_path / "a")
    assert all(torch.equal(one[name], many[name]) for name in one.keys() | many.keys())
    back = HuggingFaceSource(tmp_path / "a")
    weights = source.tensors["weight"]
    assert all(torch.equal(back.read("weight", name), value) for name, value in weights.items())
    loaded(tmp_path / "a")


@pytest.mark.parametrize(("lacking", "first"), [(0, 2), (1, 1)])
def test_a_shard_is_as_full_as_it_may_be(lacking: int, first: int, tmp_path: Path) -> None:
    """The embedding has 131 x 64 values, the norm after it 64."""
    write_huggingface(hf.native(), tmp_path / "a", shard_bytes=4 * 131 * 64 + 4 * 64 - lacking)
    assert len(load_file(min((tmp_path / "a").glob("*.safetensors")))) == first


def test_mixed_types_are_kept_and_aligned(tmp_path: Path) -> None:
    source = hf.native(toy.GPT2, hidden_size=63, num_attention_heads=3)  # an odd number of values in many tensors
    mixed = {name: value.bfloat16() if value.dim() == 2 else value for name, value in source.tensors["weight"].items()}
    write_huggingface(hf.Memory(source.config, {"weight": mixed}), tmp_path / "out")
    assert all(torch.equal(HuggingFaceSource(tmp_path / "out").read("weight", name), mixed[name]) for name in mixed)
    text = (tmp_path / "out" / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", text[:8])
    header = json.loads(text[8 : 8 + size])
    widths = {"F32": 4, "BF16": 2}
    assert size % 8 == 0
    assert all(entry["data_offsets"][0] % widths[entry["dtype"]] == 0 for entry in header.values() if "dtype" in entry)


# Memory and failures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched(hf.Memory):
    """Says how many of the tensors it gave away are still held when the next one is asked for."""

    given: list[weakref.ref[Tensor]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def read(self, kind: str, name: str) -> Tensor:
        self.held.append(sum(tensor() is not None for tensor in self.given))
        tensor = super().read(kind, name)
        self.given.append(weakref.ref(tensor))
        return tensor


def test_a_writer_holds_one_tensor(tmp_path: Path) -> None:
    """At most the parts of one fused tensor."""
    for model, most in ((toy.LLAMA, 0), (toy.GPT2, 2)):
        source = hf.native(model)
        watched = Watched(source.config, source.tensors)
        write_huggingface(watched, tmp_path / model.activation, dtype=torch.bfloat16)
        assert len(watched.held) == len(param_table(source.config.model)) and max(watched.held) == most


class Torn(hf.Memory):
    """Its last tensor cannot be read."""

    def read(self, kind: str, name: str) -> Tensor:
        if name == "head.output.weight":
            raise OSError("the disk is gone")
        return super().read(kind, name)


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    source = hf.native()
    with pytest.raises(ConfigError, match=r"out failed: the disk is gone"):
        write_huggingface(Torn(source.config, source.tensors), tmp_path / "out", shard_bytes=50_000)
    assert list(tmp_path.iterdir()) == []


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ConfigError, match=f"{name} exists.*nothing is overwritten"):
            write_huggingface(hf.native(), tmp_path / name)
    (tmp_path / "empty").mkdir()
    write_huggingface(hf.native(), tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    source = hf.native()
    source.tensors["weight"]["head.norm.weight"][3] = 1e6
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has values beyond 65504"):
        write_huggingface(source, tmp_path / "out", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_what_came_along_goes_along(folders: dict[str, Path], tmp_path: Path) -> None:
    """Tokenizer files, token ids and unknown fields survive import and export; the family is the one it was."""
    came = edited(folders["mistral"], tmp_path / "came", transformers_version="4.0", eos_token_id=[5, 9], color="red")
    files = {"tokenizer.json": "{}", "merges.txt": "a b", "LICENSE.txt": "free", "generation_config.json": '{"a": 1}'}
    for name, text in files.items():
        (came / name).write_text(text)
    (came / "README.md").write_text("theirs")
    opened = open_source(came)
    write_native(opened.source, tmp_path / "kept", companions=opened.companions())
    kept = open_source(tmp_path / "kept")
    notes = write_huggingface(kept.source, tmp_path / "went", extras=kept.extras)
    assert notes == ()
    said = json.loads((tmp_path / "went" / "config.json").read_text())
    assert (said["model_type"], said["eos_token_id"], said["color"], said["bos_token_id"]) == (
        "mistral",
        [5, 9],
        "red",
        3,
    )
    assert {name: (tmp_path / "went" / name).read_text() for name in files} == files
    assert {path.name for path in (tmp_path / "went").iterdir()} == {*files, "config.json", "model.safetensors"}


def test_token_ids_that_are_given_go_before_those_of_the_import(folders: dict[str, Path], tmp_path: Path) -> None:
    """In both files that say them: generation stops at what generation_config.json says."""
    came = edited(folders["llama"], tmp_path / "came")
    (came / "generation_config.json").write_text('{"eos_token_id": 5, "bos_token_id": 3, "temperature": 0.5}')
    write_huggingface(HuggingFaceSource(came), tmp_path / "went", extras=came, token_ids={"eos_token_id": 9})
    config, generation = (
        json.loads((tmp_path / "went" / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert (config["eos_token_id"], config["bos_token_id"]) == (9, 3)
    assert generation == {"eos_token_id": 9, "bos_token_id": 3, "temperature": 0.5}
    assert loaded(tmp_path / "went").generation_config.eos_token_id == 9


def test_an_export_is_on_the_disk_when_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in the parent folder too, which is forced after the renaming."""
    synced: list[tuple[Path, bool]] = []
    sync = shelf.sync
    monkeypatch.setattr(shelf, "sync", lambda path: (synced.append((path, (tmp_path / "out").exists())), sync(path)))
    write_huggingface(hf.native(), tmp_path / "out")
    aside = tmp_path / ".out.partial"
    before = {aside, *(aside / path.name for path in (tmp_path / "out").iterdir())}
    assert {path for path, done in synced if not done} == before
    assert [path for path, done in synced if done] == [tmp_path]


@pytest.mark.parametrize("size", ["inf", "nan", "-inf", "0"])
def test_sizes_of_files_that_are_none(size: str) -> None:
    with pytest.raises(ConfigError, match=f"--shard-size {size}.* must be a finite number greater than 0"):
        convert_checkpoint.main(["--load", "none", "--save", "out", "--to", "hf", f"--shard-size={size}"])


def test_another_family_than_the_one_it_came_from(folders: dict[str, Path], tmp_path: Path) -> None:
    source = HuggingFaceSource(folders["llama"])
    write_huggingface(source, tmp_path / "out", family="mistral", extras=folders["llama"])
    model = loaded(tmp_path / "out")
    tokens = hf.tokens_for(source.config)
    assert model.config.model_type == "mistral" and model.config.sliding_window is None
    assert (hf.their_logits(model, tokens) - hf.our_logits(source, tokens)).abs().max() < 1e-4


# Folders that are not right -------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_told_at_once(folders: dict[str, Path], tmp_path: Path) -> None:
    """Both shapes of a misshapen tensor; transposed and fused ones in their own layout."""
    shutil.copytree(folders["gpt2"], tmp_path / "a")
    tensors = stored(tmp_path / "a")
    del tensors["transformer.h.1.ln_2.bias"], tensors["transformer.wpe.weight"]
    tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(144, 48)
    tensors["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(192, dtype=torch.int8)
    tensors["transformer.h.7.ln_1.bias"] = torch.zeros(48)
    tensors["extra"] = torch.zeros(1)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        HuggingFaceSource(tmp_path / "a")
    assert str(error.value).partition("config.json. ")[2] == (
        "Missing: transformer.wpe.weight, transformer.h.1.ln_2.bias. Of another shape or type: "
        "transformer.h.0.attn.c_attn.weight is F32 (144, 48) instead of a float (48, 144); "
        "transformer.h.0.mlp.c_fc.bias is I8 (192,) instead of a float (192,). "
        "Unexpected: extra, transformer.h.7.ln_1.bias."
    )


def test_names_without_prefix_and_tensors_that_tell_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    """The first GPT-2 files lack the prefix and hold their causal masks."""
    shutil.copytree(folders["gpt2"], tmp_path / "a")
    tensors = {name.removeprefix("transformer."): value for name, value in stored(tmp_path / "a").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    weights, expected = (hf.weights_of(HuggingFaceSource(folder)) for folder in (tmp_path / "a", folders["gpt2"]))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)

    shutil.copytree(folders["llama"], tmp_path / "b")
    tensors = stored(tmp_path / "b") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    HuggingFaceSource(tmp_path / "b")


def test_a_head_beside_a_tied_embedding(folders: dict[str, Path], tmp_path: Path) -> None:
    """Accepted only if it is the embedding to the last bit."""
    shutil.copytree(folders["qwen3-mqa-tied"], tmp_path / "a")
    tensors = stored(tmp_path / "a")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert HuggingFaceSource(tmp_path / "a").config.model.tied_embeddings
    tensors["lm_head.weight"][130, 47] += 1e-6
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"Unexpected: lm_head\.weight.*tie_word_embeddings false"):
        HuggingFaceSource(tmp_path / "a")


def sharded(folder: Path) -> Path:
    write_huggingface(hf.native(), folder, shard_bytes=100_000)
    return folder


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "..", "a/b.safetensors", "x.bin", ""])
def test_an_index_reaches_no_other_folder(name: str, tmp_path: Path) -> None:
    path = sharded(tmp_path / "a") / "model.safetensors.index.json"
    shutil.copyfile(next(path.parent.glob("*.safetensors")), tmp_path / "x.safetensors")
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="names the file"):
        HuggingFaceSource(path.parent)


def test_an_index_and_its_files_disagree(tmp_path: Path) -> None:
    path = sharded(tmp_path / "a") / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "model.norm.weight": file}}))
    with pytest.raises(ConfigError, match=f"tensors that are not there: model.norm.weight in {file}"):
        HuggingFaceSource(path.parent)
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    HuggingFaceSource(path.parent)  # the file has it


@pytest.mark.parametrize("cut", [0, 5, 200, -1])
def test_a_file_cut_off_is_named(cut: int, tmp_path: Path) -> None:
    path = sorted(sharded(tmp_path / "a").glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=path.name):
        HuggingFaceSource(tmp_path / "a")


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(header: object, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "a")
    text = json.dumps(header).encode()
    (tmp_path / "a" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        HuggingFaceSource(tmp_path / "a")


def test_folders_without_weights_or_config(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        HuggingFaceSource(folder)
    for text in ("{", "[]", "\udcff"):
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=r"config\.json (is not JSON|must hold)"):
            HuggingFaceSource(folder)
    shutil.copy(folders["llama"] / "config.json", folder)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        HuggingFaceSource(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        HuggingFaceSource(folder)
    for index in ("{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "b.safetensors"}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ConfigError, match=r"(has no weight_map|b\.safetensors cannot be read)"):
            HuggingFaceSource(folder)


def test_more_layers_than_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    """A wrong number is no reason to build a table of any number of layers."""
    folder = edited(folders["llama"], tmp_path / "a", num_hidden_layers=20_000)
    with pytest.raises(ConfigError, match="too few for the 20000 layers"):
        HuggingFaceSource(folder)
