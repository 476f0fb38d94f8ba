"""What a folder is a checkpoint of, found by looking: of this project, of Hugging Face, of Megatron-LM."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from megatron3d import shelf
from megatron3d.archive import NativeSource
from megatron3d.config import ConfigError
from megatron3d.huggingface_files import CONFIG, HuggingFaceSource, companions_in
from megatron3d.huggingface_stored import read_file
from megatron3d.index import COMPANIONS, INDEX, Companions
from megatron3d.interop import Source
from megatron3d.megatron_files import MegatronSource
from megatron3d.megatron_legacy import LATEST

Kind = Literal["native", "hf", "megatron"]


class Opened(NamedTuple):
    """A source, of which library, and what the user should know of it."""

    source: Source
    kind: Kind
    folder: Path
    """Of the checkpoint itself."""
    notes: tuple[str, ...]

    @property
    def extras(self) -> Path | None:
        """Where files of Hugging Face's lie that belong to the model, if there are any: config.json, a tokenizer."""
        if self.kind == "hf":
            return self.folder
        companions = self.folder / COMPANIONS
        return companions if companions.is_dir() else None

    @property
    def tokenizer_type(self) -> str | None:
        """What Megatron-LM calls the tokenizer, where the checkpoint is its own and says so."""
        return self.source.tokenizer_type if isinstance(self.source, MegatronSource) else None

    def companions(self) -> Companions:
        """Those files, for a checkpoint of this project to keep."""
        if self.extras is None:
            return {}
        if self.kind == "hf":
            return {CONFIG: read_file(self.extras / CONFIG), **companions_in(self.extras)}
        return {path.name: path.read_bytes() for path in self.extras.iterdir() if path.is_file()}


def kind_of(folder: Path) -> Kind:
    """Whose checkpoint a folder has. ConfigError where it has none of a known kind."""
    if not folder.is_dir():
        raise ConfigError(f"--load {folder}: there is no such folder.")
    if (folder / INDEX).is_file() or shelf.checkpoints(folder):
        return "native"
    if (folder / CONFIG).exists():
        return "hf"
    if (folder / LATEST).exists() or (folder / "metadata.json").exists() or any(folder.glob("mp_rank_*")):
        return "megatron"
    raise ConfigError(
        f"--load {folder}: there is no checkpoint. This project's have step-.../{INDEX}, Hugging Face's config.json, "
        f"Megatron-LM's latest_checkpointed_iteration.txt or iter_..."
    )


def open_source(folder: Path, *, vocab_size: int = 0, seq_length: int = 0) -> Opened:
    """The checkpoint in a folder. `vocab_size`: the true vocabulary, for a Megatron-LM checkpoint that lacks it;
    `seq_length`: tokens per sample of the training to come, where a Hugging Face model is to be trained on."""
    kind = kind_of(folder)
    if vocab_size and kind != "megatron":
        raise ConfigError(f"--vocab-size {vocab_size} has no effect: {folder} says what its vocabulary is.")
    if seq_length and kind != "hf":
        raise ConfigError(f"--seq-length {seq_length} has no effect: {folder} says how long its samples are.")
    if kind == "native":
        found = shelf.find(folder)
        return Opened(NativeSource(found.path, found.index), kind, found.path, found.passed_over)
    if kind == "hf":
        theirs = HuggingFaceSource(folder, seq_length=seq_length)
        return Opened(theirs, kind, folder, theirs.notes)
    megatron = MegatronSource(folder, vocab_size=vocab_size or None)
    return Opened(megatron, kind, folder, megatron.notes)
