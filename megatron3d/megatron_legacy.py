"""Megatron-LM's legacy folders (`--ckpt-format torch`): one file of torch.save for each rank.

    iter_0000007/mp_rank_TT/model_optim_rng.pt          at one pipeline stage; TT: the tensor rank
    iter_0000007/mp_rank_TT_PPP/model_optim_rng.pt      at several; PPP: the stage

The one idea: layers are counted as they are found, chunk by chunk and stage by stage, and must come to the number that
the run's args give. So any split of layers is read, even or not, and none is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron3d.config import ConfigError
from megatron3d.layout import Box, whole
from megatron3d.megatron_lm import IGNORED, LAYER, local_name, split_dim
from megatron3d.megatron_stored import WEIGHTS_ONLY, Find, Kept, Whole
from megatron3d.torch_file import TorchFile
from megatron3d.unpickle import Namespace, StoredTensor
from megatron3d.words import listed

FILE = "model_optim_rng.pt"
LATEST = "latest_checkpointed_iteration.txt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
CHUNK = re.compile(r"model(\d*)")
Weights = Mapping[str, StoredTensor]


def open_legacy(folder: Path) -> Kept:
    """What the rank files in `folder` hold together. ConfigError names the file or the number that does not fit."""
    files = _rank_files(folder)
    states = {rank: _state(path) for rank, path in files.items()}
    tp, pp = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    first = states[0, 0]
    args = _args(first, files[0, 0])
    _check_layout(folder, args, tp, pp)
    tensors: dict[str, Whole] = {}
    counts: list[int] = []
    for chunk in _chunks(states.values()):
        for stage in range(pp):
            ranks = [_weights(states[rank, stage], chunk, files[rank, stage]) for rank in range(tp)]
            places = [str(files[rank, stage]) for rank in range(tp)]
            _check_same_names(ranks, places)
            counts.append(_add(tensors, ranks, places, sum(counts)))
    _check_layers(folder, args, counts)
    held = any("optimizer" in state for state in states.values()) or any(folder.glob("*/distrib_optim.pt"))
    iteration = first.get("iteration")
    return Kept(
        folder=folder,
        args=args,
        iteration=iteration if type(iteration) is int else None,
        tensors=tensors,
        fused=tp,
        notes=(WEIGHTS_ONLY,) * held,
    )


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(tensor rank, stage) -> its file; a whole grid of them."""
    files = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = RANK.fullmatch(path.name)
        if match is None:
            raise ConfigError(
                f"{path} is of a tensor rank, a stage and something more: experts are not built here. What is read is "
                "mp_rank_TT or mp_rank_TT_PPP."
            )
        files[int(match[1]), int(match[2] or 0)] = path / FILE
    wanted = {(t, p) for t in range(1 + max(files)[0]) for p in range(1 + max(p for _, p in files))}
    missing = [f"mp_rank_{t:02d}_{p:03d}" for t, p in sorted(wanted - files.keys())]
    if missing:
        raise ConfigError(f"{folder} is not whole: it has files of {len(files)} ranks, but none of {_some(missing)}.")
    return files


def _state(path: Path) -> Mapping[str, Any]:
    state = TorchFile(path).value
    if not isinstance(state, dict):
        raise ConfigError(f"{path} holds no checkpoint of Megatron-LM: it is no dictionary.")
    return state


def _args(state: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    args = state.get("args")
    if not isinstance(args, Namespace):
        raise ConfigError(f"{path} does not say what model it is of: it has no args.")
    return args.fields


def _check_layout(folder: Path, args: Mapping[str, Any], tp: int, pp: int) -> None:
    for name, found in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        said = args.get(name)
        if said is not None and said != found:
            raise ConfigError(f"{folder} has files of {found} ranks, but its args say {name} {said!r}.")


def _chunks(states: Any) -> list[str]:
    """Keys of the model's parts: "model", or with virtual stages "model0", "model1", ... in the order of depth."""
    found = {key for state in states for key in state if isinstance(key, str) and CHUNK.fullmatch(key)}
    return sorted(found, key=lambda key: int(key.removeprefix("model") or 0))


def _weights(state: Mapping[str, Any], chunk: str, path: Path) -> Weights:
    """The tensors of a part of the model, in the spelling of the local layers and counted from its first layer."""
    found: dict[str, StoredTensor] = {}
    for theirs, value in _flat(state.get(chunk, {}), ""):
        name = local_name(theirs)
        if IGNORED.search(theirs):
            continue
        if not isinstance(value, StoredTensor):
            raise ConfigError(f"{path}: {theirs} in {chunk} is no tensor.")
        if name in found:
            raise ConfigError(f"{path}: {chunk} has {name} under two names, one of them {theirs}.")
        found[name] = value
        version = state.get("checkpoint_version", 0)
        if ".query_key_value." in theirs and not (type(version) in (int, float) and version >= 2):
            raise ConfigError(
                f"{path} has checkpoint_version {version!r}: its queries, keys and values lie in an order that is not "
                "read. What works is 2.0 or 3.0: load it with Megatron-LM and save it again."
            )
    return found


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of nested dictionaries; the classic model has such."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _check_same_names(ranks: list[Weights], places: list[str]) -> None:
    for weights, place in zip(ranks, places, strict=True):
        if differing := sorted(weights.keys() ^ ranks[0].keys()):
            raise ConfigError(f"{place} and {places[0]} have not the same tensors: only one has {_some(differing)}.")


def _add(tensors: dict[str, Whole], ranks: list[Weights], places: list[str], first: int) -> int:
    """Adds a stage's tensors, its layers counted from `first` on; returns how many layers it has."""
    count = 0
    for name in ranks[0]:
        match = LAYER.fullmatch(name)
        if match is not None:
            count = max(count, 1 + int(match[1]))
        whole_name = name if match is None else f"decoder.layers.{first + int(match[1])}.{match[2]}"
        if whole_name in tensors:
            raise ConfigError(f"{places[0]} has {whole_name}, which an earlier stage has too.")
        tensors[whole_name] = _joined(name, [weights[name] for weights in ranks], places)
    return count


def _joined(name: str, shares: list[StoredTensor], places: list[str]) -> Whole:
    """The whole of what tensor ranks hold of one tensor."""
    shape, dtype, dim = shares[0].shape, shares[0].dtype, split_dim(name)
    for share, place in zip(shares, places, strict=True):
        if (share.shape, share.dtype) != (shape, dtype):
            raise ConfigError(
                f"{name} has shape {share.shape} and type {share.dtype} in {place}, but {shape} and {dtype} in "
                f"{places[0]}."
            )
    if dim is None or dim >= len(shape):
        copies = tuple((f"{name} in {place}", _found(share)) for share, place in zip(shares, places, strict=True))
        return Whole(shape, dtype, ((whole(shape), _found(shares[0])),), copies[1:])
    parts: list[tuple[Box, Find]] = []
    for rank, share in enumerate(shares):
        box = list(whole(shape))
        box[dim] = (rank * shape[dim], (rank + 1) * shape[dim])
        parts.append((tuple(box), _found(share)))
    total = (*shape[:dim], len(shares) * shape[dim], *shape[dim + 1 :])
    return Whole(total, dtype, tuple(parts))


def _found(share: StoredTensor) -> Find:
    return lambda: share


def _check_layers(folder: Path, args: Mapping[str, Any], counts: list[int]) -> None:
    said = args.get("num_layers")
    if type(said) is int and sum(counts) != said:
        raise ConfigError(
            f"{folder} has {sum(counts)} layers ({listed(counts, 'and')} in its stages), but its args say num_layers "
            f"{said}."
        )


def _some(names: list[str]) -> str:
    return listed(names if len(names) <= 5 else [*names[:5], f"{len(names) - 5} more"], "and")
