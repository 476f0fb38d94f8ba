"""Text to token ids and back: raw bytes, or a SentencePiece model.

The one idea: a tokenizer is four members, and the text comes back unchanged: `decode(encode(text)) == text` for `byte`
and for every model of tools/train_tokenizer.py. (Models trained elsewhere may normalise the text; that is theirs.)
Where documents come from is in corpus.py, where their tokens go in indexed.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from megatron3d.config import ConfigError

EOD_PIECE = "<|endoftext|>"
"""Name of the piece that ends a document in the models that we train; no text encodes to it."""

SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space inside SentencePiece


class Tokenizer(Protocol):
    """Ids are 0 to vocab_size - 1; `eod` ends a document and decodes to nothing."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, `eod` included."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without `eod`; UnicodeEncodeError (a ValueError) for half of a surrogate pair."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. ConfigError for an id outside the vocabulary."""


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer called `byte`, or that of a SentencePiece .model file. ConfigError where there is none."""
    if spec == "byte":
        return ByteTokenizer()
    if not spec:
        raise ConfigError("No tokenizer is given: name a SentencePiece .model file, or `byte`.")
    return SentencePieceTokenizer(spec)


@dataclass(frozen=True)
class ByteTokenizer:
    """An id for each byte of the UTF-8 text, and one more to end a document."""

    eod: int = 256
    vocab_size: int = 257

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes."""
        return bytes(_without_eod(ids, self.eod, self.vocab_size)).decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model; its end-of-sentence piece ends a document."""

    def __init__(self, path: str) -> None:
        self._model = _load_model(path)
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        if self.eod < 0:
            raise ConfigError(f"The tokenizer {path} has no end-of-sentence piece to end documents with: use another.")
        self._mark = _bytes_of_mark(self._model)

    def encode(self, text: str) -> list[int]:
        """The ids of the text's pieces."""
        text.encode()  # half of a surrogate pair fails here, with its position
        if not self._mark or SPACE_MARK not in text:
            return list(self._model.encode(text))
        # SentencePiece would turn the character it uses for spaces into one; its three bytes stay what they are.
        parts = [self._model.encode(part) + self._mark for part in text.split(SPACE_MARK)]
        return list(chain.from_iterable(parts))[: -len(self._mark)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of pieces."""
        return str(self._model.decode(_without_eod(ids, self.eod, self.vocab_size)))


def _load_model(path: str) -> Any:
    import sentencepiece  # late: only who uses a model pays for it

    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"Cannot read the tokenizer {path}: {error.strerror}. Give a .model file, or `byte`."
        ) from None
    except RuntimeError:
        model = None
    if model is None or model.vocab_size() == 0:
        raise ConfigError(f"The tokenizer {path} is not a SentencePiece model. Give a .model file, or `byte`.")
    return model


def _bytes_of_mark(model: Any) -> list[int]:
    """Ids of the bytes of SPACE_MARK; empty for a model without bytes, or one that begins each text with a space."""
    ids = [model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    adds_space = str(model.id_to_piece(model.encode(".")[0])).startswith(SPACE_MARK)
    return ids if not adds_space and all(model.is_byte(id) for id in ids) else []


def _without_eod(ids: Iterable[int], eod: int, vocab_size: int) -> list[int]:
    kept = [int(id) for id in ids if id != eod]
    for id in kept:
        if not 0 <= id < vocab_size:
            raise ConfigError(f"The token id {id} is outside the tokenizer's vocabulary of {vocab_size} ids.")
    return kept
