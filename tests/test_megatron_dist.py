"""Megatron-LM's distributed checkpoints, as newer ones lay out their tensors, and damaged indexes."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron3d import torch_file
from megatron3d.config import ConfigError
from megatron3d.megatron_files import MegatronSource
from megatron3d.megatron_lm import engine_name
from tests.megatron import FIXTURES, assert_same, fixture_weights, states, weights


def dist(
    folder: Path, model: str, *, halves: bool, stacked: bool = False, more: Mapping[str, Tensor] | None = None
) -> Path:
    """A distributed checkpoint with a tensor for each layer or one for all; optionally with gate and up apart."""
    state = states(model)["mp_rank_00"]
    tensors: dict[str, Tensor] = {}
    for name, tensor in state["model"].items():
        if tensor is not None and halves and ".linear_fc1." in name:
            tensors[f"{name}_w"], tensors[f"{name}_v"] = (half.clone() for half in tensor.chunk(2))
        elif tensor is not None:
            tensors[engine_name(name)] = tensor
    if stacked:
        of_layers = [name for name in tensors if name.startswith("decoder.layers.0.")]
        for name in of_layers:
            layers = [tensors.pop(name.replace(".0.", f".{layer}.", 1)) for layer in range(4)]
            tensors[name.replace(".0.", ".", 1)] = torch.stack(layers)
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save(tensors | dict(more or {}), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    common = {"args": state["args"], "iteration": 7, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


@pytest.mark.parametrize("halves", [False, True], ids=["gate and up in one", "apart"])
def test_distributed_checkpoints_layer_by_layer(halves: bool, tmp_path: Path) -> None:
    moments = {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    source = MegatronSource(dist(tmp_path / "a", "llama", halves=halves, more=moments))
    assert_same(weights(source), fixture_weights("llama"))
    assert any("optimizer" in note for note in source.notes)


def test_layers_that_are_stacked_in_one_chunk(tmp_path: Path) -> None:
    folder = dist(tmp_path / "a", "llama", halves=False, stacked=True)
    assert len(list(pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata)) == 9
    assert_same(weights(MegatronSource(folder)), fixture_weights("llama"))


def test_stacked_layers_are_not_read_again_for_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is read whole once, for its checksum, and then of each further layer what is its own."""
    folder, read = dist(tmp_path / "a", "llama", halves=False, stacked=True), []
    readinto = torch_file._Window.readinto

    def counting(window: Any, buffer: Any) -> int:
        read.append(readinto(window, buffer))
        return read[-1]

    monkeypatch.setattr(torch_file._Window, "readinto", counting)
    source = MegatronSource(folder)
    opened = sum(read)
    weights(source)
    kept = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert 0 < sum(read) - opened < 2 * kept


def change_index(folder: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def drop_chunk(index: Any) -> None:
    index.state_dict_metadata["decoder.final_layernorm.weight"].chunks.clear()


def lead_out(index: Any) -> None:
    next(iter(index.storage_data.values())).relative_path = "../elsewhere"


def compress(index: Any) -> None:
    next(iter(index.storage_data.values())).transform_descriptors = ["zstd"]


def forget_places(index: Any) -> None:
    index.storage_data = None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop_chunk, "decoder.final_layernorm.weight is not whole: 0 of 48 values"),
        (lead_out, "'../elsewhere', which leads out of the folder"),
        (compress, "compressed or encrypted"),
        (forget_places, "is no index of tensors"),
    ],
)
def test_damaged_indexes(change: Callable[[Any], None], told: str, tmp_path: Path) -> None:
    folder = dist(tmp_path / "a", "llama", halves=False)
    change_index(folder, change)
    with pytest.raises(ConfigError) as caught:
        MegatronSource(folder)
    assert told in str(caught.value)


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{FC1}_w", Tensor.bfloat16),
        (f"{FC1}_v", Tensor.bfloat16),
        (f"{FC1}_v", Tensor.double),
        (f"{FC1}_v", lambda half: torch.cat([half, half], dim=1)),
        (f"{FC1}_v", lambda half: half[:-1]),
        (f"{FC1}_v", lambda half: half[0]),
        (f"{FC1}_w", lambda half: half[0, 0]),
    ],
)
def test_halves_that_do_not_go_together(name: str, change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """Of another type or shape: refused, and never read as what they are not."""
    half = states("llama")["mp_rank_00"]["model"][FC1][:80]
    folder = dist(tmp_path / "a", "llama", halves=True, more={name: change(half).clone()})
    with pytest.raises(ConfigError, match=rf"{FC1}_w has shape .*equal halves of one tensor"):
        MegatronSource(folder)


def test_a_tensor_of_all_layers_has_dims(tmp_path: Path) -> None:
    folder = dist(tmp_path / "a", "llama", halves=False, more={"decoder.layers.scale": torch.tensor(1.0)})
    with pytest.raises(ConfigError, match=r"decoder\.layers\.scale of shape \(\) is not expected"):
        MegatronSource(folder)


def endless_layers(folder: Path) -> None:
    """In the index."""

    def change(index: Any) -> None:
        tensor = index.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
        tensor.size = tensor.chunks[0].sizes = torch.Size([10**5, 160, 48])

    change_index(folder, change)


def many_layers(folder: Path) -> None:
    """In the args."""
    common = torch.load(folder / "common.pt", weights_only=False)
    common["args"] = Namespace(**{**vars(common["args"]), "num_layers": 10**5})
    torch.save(common, folder / "common.pt")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (endless_layers, r"linear_fc1\.weight has shape \(100000, 160, 48\), more than all its files hold"),
        (many_layers, r"27 tensors are too few for the 100000 layers of its args"),
    ],
)
def test_more_layers_than_there_can_be_are_refused_soon(
    change: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    folder = dist(tmp_path / "a", "llama", halves=False, stacked=True)
    change(folder)
    with pytest.raises(ConfigError, match=told):
        MegatronSource(folder)


def test_an_index_runs_nothing(tmp_path: Path) -> None:
    folder = dist(tmp_path / "a", "llama", halves=False)
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    with pytest.raises(ConfigError, match=r"\.metadata holds 'os\.system'"):
        MegatronSource(folder)


def test_chunks_that_are_not_what_the_index_says(tmp_path: Path) -> None:
    folder = dist(tmp_path / "a", "llama", halves=False)

    def swap(index: Any) -> None:
        places = {key.fqn: key for key in index.storage_data}
        one, other = (places[f"decoder.layers.0.{name}.weight"] for name in ("mlp.linear_fc1", "mlp.linear_fc2"))
        storage = index.storage_data
        storage[one], storage[other] = storage[other], storage[one]

    change_index(folder, swap)
    source = MegatronSource(folder)
    with pytest.raises(ConfigError, match=r"something else than the torch\.float32 of shape \(160, 48\)"):
        source.read("weight", "layers.0.mlp.up.weight")
    shutil.rmtree(folder / "missing", ignore_errors=True)
    for file in folder.glob("*.distcp"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"distcp cannot be read: FileNotFoundError"):
        MegatronSource(folder).read("weight", "head.norm.weight")


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ('{"sharded_backend": "zarr"}', "written by 'zarr'"),
        ("[]", "does not say which library"),
        (None, "does not say which library"),
    ],
)
def test_other_distributed_formats(metadata: str | None, told: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "llama" / "torch_dist_tp1_pp1" / "iter_0000007", tmp_path / "a")
    (tmp_path / "a" / "metadata.json").unlink()
    if metadata is not None:
        (tmp_path / "a" / "metadata.json").write_text(metadata)
    with pytest.raises(ConfigError, match=told):
        MegatronSource(tmp_path / "a")
