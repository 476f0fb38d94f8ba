"""Convert a checkpoint: another layout or type, to or from Hugging Face or Megatron-LM. See --help; the work is in
megatron3d/convert.py, huggingface_files.py and megatron_files.py. One process, on the CPU, a tensor at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megatron3d.cli import parse_tool
from megatron3d.config import ConfigError, DType, ModelConfig
from megatron3d.launch import user_errors
from megatron3d.words import flag


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the tool."""

    load: str
    """Folder of the checkpoint; whose it is is found by looking. Of a --save folder the newest whole one is taken."""
    save: str
    """Folder to make."""
    to: Literal["native", "hf", "megatron"] = "native"
    """native: for --load of pretrain_gpt.py; hf: for transformers; megatron: for Megatron-LM (legacy format)."""
    tp: int = 1
    """native, megatron: tensor-parallel ranks whose files are written. A native checkpoint loads on any layout."""
    pp: int = 1
    """native, megatron: pipeline stages, likewise."""
    dtype: DType | None = None
    """Type of the weights; default: as they are. From the fp32 masters, where there are any."""
    optimizer: bool = True
    """native: keep masters and moments. Without them a run can begin with the weights (--load-weights-only), not go
    on."""
    jobs: int = 0
    """Tensors dealt with at a time, as far as they are small; 0: one per core, 4 at most."""
    vocab_size: int = 0
    """From Megatron-LM: the true vocabulary, where the checkpoint does not say it."""
    seq_length: int = 0
    """From Hugging Face: tokens per sample of the training to come; 0: the model's longest context."""
    family: str = ""
    """hf: model_type, where several can express the model; default: what it was imported as, else the simplest."""
    bos_token_id: int | None = None
    """hf: id that begins a text, for a model that was not imported; default: none."""
    eos_token_id: int | None = None
    """hf: id that ends one, at which generation stops; default: that of the run's tokenizer."""
    pad_token_id: int | None = None
    """hf: id that fills up a batch; default: none."""
    transformer_engine: bool = False
    """megatron: names of Transformer Engine's layers (its default --transformer-impl) instead of the local ones."""
    shard_size: float = 5.0
    """hf: most GB (10^9 bytes) of a file."""
    json: bool = False
    """Print the summary as one JSON object."""


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
BELONGS = {
    "native": {"tp", "pp", "dtype", "optimizer"},
    "megatron": {"tp", "pp", "dtype", "transformer_engine"},
    "hf": {"dtype", "family", "shard_size", *TOKEN_IDS},
}
"""Kind of result -> flags that act on it."""


def main(argv: Sequence[str]) -> None:
    """Opens, converts, prints a summary."""
    flags = parse_tool(Flags, argv, description="Convert a checkpoint between layouts, types and libraries.")
    check(flags)
    from megatron3d.heap import keep_freed_memory
    from megatron3d.sources import open_source  # needs torch, which --help and wrong flags do without

    keep_freed_memory()  # or every tensor would take and give back its pages
    began = time.perf_counter()
    load, save = Path(flags.load), Path(flags.save)
    opened = open_source(load, vocab_size=flags.vocab_size, seq_length=flags.seq_length)
    tell(opened.notes)
    with told() as progress:
        path = convert(opened, save, flags, progress)
    model = opened.source.config.model
    summary = {
        "from": opened.kind,
        "load": str(opened.folder),
        "to": flags.to,
        "save": str(path),
        "parameters": parameters(model),
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "seconds": round(time.perf_counter() - began, 2),
    }
    text = "{save}: {parameters:,} parameters, {bytes:,} bytes, {to} from {from} in {seconds} s"
    print(json.dumps(summary) if flags.json else text.format_map(summary))


def check(flags: Flags) -> None:
    """Refuses numbers out of range and flags without effect."""
    if not flags.load or not flags.save:
        raise ConfigError("--load and --save need a folder each, not an empty name.")
    for name, least in (("tp", 1), ("pp", 1), ("jobs", 0), ("vocab_size", 0), ("seq_length", 0)):
        if getattr(flags, name) < least:
            raise ConfigError(f"{flag(name)} {getattr(flags, name)} must be at least {least}.")
    if not 0 < flags.shard_size < math.inf:
        raise ConfigError(f"--shard-size {flags.shard_size} must be a finite number greater than 0.")
    defaults = Flags(load=flags.load, save=flags.save)
    for name in sorted(set().union(*BELONGS.values()) - BELONGS[flags.to]):
        if getattr(flags, name) != getattr(defaults, name):
            given = "--no-optimizer" if name == "optimizer" else flag(name)
            raise ConfigError(f"{given} has no effect on --to {flags.to}. Leave it out.")


def convert(opened: Any, save: Path, flags: Flags, progress: Any) -> Path:
    """Writes the result; returns its folder."""
    from megatron3d.convert import write_native
    from megatron3d.dtypes import DTYPES
    from megatron3d.huggingface_files import write_huggingface
    from megatron3d.megatron_write import write_megatron

    dtype = DTYPES[flags.dtype] if flags.dtype else None
    jobs = flags.jobs or min(4, os.cpu_count() or 1)
    if flags.to == "native":
        return write_native(
            opened.source,
            save,
            tp=flags.tp,
            pp=flags.pp,
            dtype=dtype,
            optimizer=flags.optimizer,
            jobs=jobs,
            companions=opened.companions(),
            progress=progress,
        )
    if flags.to == "megatron":
        return write_megatron(
            opened.source,
            save,
            tp=flags.tp,
            pp=flags.pp,
            dtype=dtype,
            progress=progress,
            transformer_engine=flags.transformer_engine,
            threads=jobs,
            **({"tokenizer_type": opened.tokenizer_type} if opened.tokenizer_type else {}),
        )
    tell(
        write_huggingface(
            opened.source,
            save,
            dtype=dtype,
            family=flags.family or None,
            extras=opened.extras,
            shard_bytes=int(flags.shard_size * 1e9),
            token_ids=token_ids(opened, flags),
            progress=progress,
            threads=jobs,
        )
    )
    return save


def token_ids(opened: Any, flags: Flags) -> dict[str, int]:
    """Those that were given, and the end of a document in the tokenizer that a run of ours was trained with."""
    from megatron3d.index import COMPANIONS
    from megatron3d.resume import kept_tokenizer
    from megatron3d.tokenizer import load_tokenizer

    given = {name: getattr(flags, name) for name in TOKEN_IDS if getattr(flags, name) is not None}
    if opened.kind != "native" or (opened.extras is not None and (opened.extras / "config.json").exists()):
        return given  # an imported model has its own
    spec = kept_tokenizer(opened.source.config, opened.folder / COMPANIONS)
    with contextlib.suppress(ConfigError):  # there may be none
        return {"eos_token_id": load_tokenizer(spec).eod, **given}
    return given


def tell(notes: Sequence[str]) -> None:
    """What the user should know, beside the result."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


@contextlib.contextmanager
def told() -> Iterator[Any]:
    """A bar on a terminal; gives what is to be called with the bytes done and the total."""
    console = Console(stderr=True)
    columns = (TextColumn("Converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def parameters(model: ModelConfig) -> int:
    """Number of values of the weights."""
    from megatron3d.params import num_parameters, param_table

    return num_parameters(param_table(model))


if __name__ == "__main__":
    with user_errors():
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:
            sys.exit(130)  # as a shell calls it; what was begun is gone
