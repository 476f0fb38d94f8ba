"""Text to token ids and back: raw bytes, a SentencePiece model, or a tokenizer.json of Hugging Face's.

The one idea: a tokenizer is four members, and the text comes back unchanged: `decode(encode(text)) == text` for `byte`
and for every model of tools/train_tokenizer.py. (Models trained elsewhere may normalise the text; that is theirs.)
Where documents come from is in corpus.py, where their tokens go in indexed.py, which files a tokenizer.json has beside
it in huggingface_tokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from megatron3d.config import ConfigError
from megatron3d.huggingface_tokenizer import BESIDE, definition_of, end_token, is_tokenizer_json

EOD_PIECE = "<|endoftext|>"
"""Name of the piece that ends a document in the models that we train; no text encodes to it."""
CHOICES = "a SentencePiece .model file, a tokenizer.json of Hugging Face's, or `byte`"

SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space inside SentencePiece
NO_TEXT = "\N{REPLACEMENT CHARACTER}"
# Byte-level pieces are written in 256 letters, one for each byte; those that are themselves here are never in UTF-8.
NEVER = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))


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
    """The tokenizer called `byte`, or that of a file: SentencePiece's, or Hugging Face's if its name ends in .json.

    ConfigError where there is none.
    """
    if spec == "byte":
        return ByteTokenizer()
    if not spec:
        raise ConfigError(f"No tokenizer is given: name {CHOICES}.")
    return HuggingFaceTokenizer(spec) if is_tokenizer_json(spec) else SentencePieceTokenizer(spec)


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


class HuggingFaceTokenizer:
    """A tokenizer.json; the eos_token that the files beside it name ends a document, else EOD_PIECE."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._model, vocabulary = _load_definition(path)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eod: int = _end_of_document(path, vocabulary)
        self._model.add_special_tokens([self._model.id_to_token(self.eod)])
        self._model.encode_special_tokens = True  # as any other text, or a document could contain its own end

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[str]]:
        return HuggingFaceTokenizer, (self._path,)  # a pickled model would forget how it encodes special tokens

    def encode(self, text: str) -> list[int]:
        """The ids of the text's tokens, as the library's `encode` gives them without special tokens."""
        text.encode()  # half of a surrogate pair fails here, with its position
        try:
            found = self._model.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more special
            raise ConfigError(f"The tokenizer {self._path} cannot encode {text[:80]!r}: {error}.") from None
        ids: list[int] = found.ids
        if self.eod in ids:
            start, stop = found.offsets[ids.index(self.eod)]
            raise ConfigError(
                f"The tokenizer {self._path} makes the token that ends a document of {text[start:stop][:80]!r}, so it "
                f"cannot encode a text that has it. Leave such documents out, or use another tokenizer."
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; an id that no token has, of which the vocabulary may have some, becomes U+FFFD."""
        kept = _without_eod(ids, self.eod, self.vocab_size)
        gaps = [at for at, id in enumerate(kept) if self._model.id_to_token(id) is None]
        parts = zip([0, *(at + 1 for at in gaps)], [*gaps, len(kept)], strict=True)
        return NO_TEXT.join(self._model.decode(kept[start:stop], skip_special_tokens=False) for start, stop in parts)


def _load_model(path: str) -> Any:
    import sentencepiece  # late: only who uses a model pays for it

    try:
        content = Path(path).read_bytes()
        model = sentencepiece.SentencePieceProcessor(model_proto=content) if content else None
    except OSError as error:
        raise ConfigError(f"Cannot read the tokenizer {path}: {error.strerror}. Give {CHOICES}.") from None
    except RuntimeError:
        model = None
    if model is None or model.vocab_size() == 0:
        raise ConfigError(f"The tokenizer {path} is not a SentencePiece model. Give {CHOICES}.")
    return model


def _bytes_of_mark(model: Any) -> list[int]:
    """Ids of the bytes of SPACE_MARK; empty for a model without bytes, or one that begins each text with a space."""
    ids = [model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    adds_space = str(model.id_to_piece(model.encode(".")[0])).startswith(SPACE_MARK)
    return ids if not adds_space and all(model.is_byte(id) for id in ids) else []


def _load_definition(path: str) -> tuple[Any, dict[str, int]]:
    """The library's tokenizer, and all its tokens' ids. ConfigError where it would not do what the file says."""
    try:
        import tokenizers  # late: only who uses one needs the package
    except ImportError:
        raise ConfigError(
            f"The tokenizer {path} is read by the package tokenizers, which is not installed: it comes with the extra "
            f"`hf` (pip install -e '.[hf]')."
        ) from None
    definition = definition_of(Path(path))
    try:
        model = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # some of what is wrong is a panic of the library's, which is no Exception
        raise ConfigError(f"{path} is no tokenizer of Hugging Face's: {error}. Give {CHOICES}.") from None
    vocabulary = model.get_vocab(with_added_tokens=True)
    added = {token["content"]: token["id"] for token in definition.get("added_tokens", ())}
    moved = [name for name, id in added.items() if vocabulary.get(name) != id]
    if moved or len(set(vocabulary.values())) != len(vocabulary):
        what = f"{moved[0]!r} cannot have the id {added[moved[0]]}" if moved else "two tokens have one id"
        raise ConfigError(f"The tokenizer {path} contradicts itself: {what}. Take the file from its source again.")
    if not vocabulary or _loses_characters(model.model, vocabulary):
        raise ConfigError(
            f"The tokenizer {path} has {len(vocabulary)} tokens, but neither one for each byte nor an unknown token, "
            f"so characters would vanish from texts. Train it with all bytes (initial_alphabet), or use another."
        )
    return model, vocabulary


def _loses_characters(model: Any, vocabulary: Mapping[str, int]) -> bool:
    """Whether the model leaves out what it has no token for: pairs of bytes or characters do where nothing else is."""
    from tokenizers import models, pre_tokenizers

    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return False
    fallback = {f"<0x{byte:02X}>" for byte in range(256)}
    letters = set(pre_tokenizers.ByteLevel.alphabet()) - NEVER
    return not (letters <= vocabulary.keys() or (model.byte_fallback and fallback <= vocabulary.keys()))


def _end_of_document(path: str, vocabulary: Mapping[str, int]) -> int:
    named = end_token(Path(path))
    name = named or EOD_PIECE
    if name not in vocabulary:
        by = "files beside it call eos_token" if named else "ends a document where no file beside it names another"
        raise ConfigError(
            f"The tokenizer {path} has no token {name!r}, which {by}. Name a token of its vocabulary in "
            f'{BESIDE[0]} beside it: {{"eos_token": "..."}}.'
        )
    return vocabulary[name]


def _without_eod(ids: Iterable[int], eod: int, vocab_size: int) -> list[int]:
    kept = [int(id) for id in ids if id != eod]
    for id in kept:
        if not 0 <= id < vocab_size:
            raise ConfigError(f"The token id {id} is outside the tokenizer's vocabulary of {vocab_size} ids.")
    return kept
