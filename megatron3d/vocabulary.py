"""From text to a SentencePiece model with which any text survives the round trip.

The one idea: byte-pair pieces of the frequent characters, bytes for all others, and no normalisation: spaces, tabs and
line ends are characters like any other, which source code needs. The same text gives the same model.

tokenizer.py uses such a model; the files are corpus.py's.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from megatron3d.config import ConfigError
from megatron3d.tokenizer import EOD_PIECE, SPACE_MARK

BYTES_AND_MARKS = 256 + 2  # ids that every model has: bytes, the unknown piece and the end of a document
SMALLEST_VOCAB = BYTES_AND_MARKS + 16
COVERAGE = 0.9995  # share of the text whose characters get pieces of their own
NEVER_PIECES = {SPACE_MARK, "\N{LOWER FIVE EIGHTHS BLOCK}", "\0"}  # SentencePiece's own marks
SENTENCE = 1 << 15  # characters; SentencePiece counts positions in 16 bits


def train_model(documents: Callable[[], Iterable[str]], vocab_size: int) -> bytes:
    """A SentencePiece model of exactly `vocab_size` ids, as the content of a .model file.

    `documents` is called twice and gives the same texts each time. ConfigError where the size is too small for the
    bytes, or larger than the text has pieces for; the message gives the largest possible.
    """
    import sentencepiece

    if vocab_size < SMALLEST_VOCAB:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: {BYTES_AND_MARKS} ids are bytes and marks. Use {SMALLEST_VOCAB} "
            f"or more."
        )
    rare = dict.fromkeys(map(ord, _rare_characters(documents(), (vocab_size - BYTES_AND_MARKS) // 2)))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(part for text in documents() for part in sentences(text.translate(rare))),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        hard_vocab_limit=False,  # too few pieces are told below
        byte_fallback=True,
        character_coverage=1.0,  # the rare characters are gone already
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        eos_piece=EOD_PIECE,
        max_sentence_length=4 * SENTENCE,  # in bytes
        num_threads=1,
        minloglevel=2,
    )
    largest = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    if largest < vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too large for this text: it has pieces for {largest} ids at most. Use "
            f"--vocab-size {largest} or less, or more text."
        )
    return model.getvalue()


def sentences(text: str) -> Iterator[str]:
    """The text in parts of at most SENTENCE characters, cut after a line end where there is one."""
    start = 0
    while start < len(text):
        end = start + SENTENCE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _rare_characters(documents: Iterable[str], most: int) -> set[str]:
    """The characters that get no piece of their own: all but the `most` frequent, and what lies beyond COVERAGE."""
    counts: Counter[str] = Counter()
    for text in documents:
        counts.update(text)
    if not counts:
        raise ConfigError("The input has no text to train on: every file is empty.")
    kept: set[str] = set()
    covered = 0
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(kept) == most or covered >= COVERAGE * counts.total():
            break
        kept.add(character)
        covered += count
    return set(counts) - kept | NEVER_PIECES
