"""Checkpoints of zeros, made without torch: what a run finds before it starts."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from megatron3d.config import Config
from megatron3d.config_io import to_dict
from megatron3d.index import FORMAT, Index, Stored, Tensors, chunk_rows, dump
from megatron3d.layout import whole
from megatron3d.loss_scale import LossScale
from megatron3d.params import param_table
from megatron3d.tensor_header import make_header

FILE = "rank-00000.safetensors"
META: dict[str, Any] = {
    "step": 10,
    "consumed_samples": 40,
    "consumed_tokens": 400,
    "skipped_steps": 0,
    "bad_steps": 0,
    "adam_count": 10,
    "wandb_id": "",
    "loss_scale": LossScale().state(),
}


def blank_checkpoint(config: Config, kinds: Sequence[str] = ("weight", "exp_avg", "exp_avg_sq")) -> dict[str, bytes]:
    """The files of a checkpoint of a resolved config, at step 10, all of whose values are zero."""
    tensors: dict[str, dict[str, Tensors]] = {kind: {} for kind in kinds}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for kind in kinds:
        for spec in param_table(config.model):
            key, box = f"{kind}/{spec.name}", whole(spec.shape)
            row, rows = 4 * math.prod(spec.shape[1:]), chunk_rows(box, "F32")
            sums = [
                zlib.crc32(bytes(row * min(rows, spec.shape[0] - start))) for start in range(0, spec.shape[0], rows)
            ]
            tensors[kind][spec.name] = Tensors(spec.shape, "F32", (Stored(box, FILE, key, tuple(sums)),))
            shapes[key] = ("F32", spec.shape)
    header, entries = make_header(shapes)
    size = sum(entry.size for entry in entries.values())
    index = dump(Index({**META, "config": to_dict(config)}, tensors))
    return {"index.json": index.encode(), FILE: header + bytes(size)}


def edited(text: str | bytes, change: Callable[[dict[str, Any]], object], *, honest: bool = True) -> str:
    """The text of an index whose content has been changed; `honest`: with the checksum of what it says now."""
    told = json.loads(text)
    change(told["content"])
    if honest:
        canonical = json.dumps(told["content"], sort_keys=True, separators=(",", ":"))
        told["crc32"] = zlib.crc32(canonical.encode())
    assert told["format"] == FORMAT
    return json.dumps(told)
