"""Which tokens sample i has, and which samples a rank reads: data as a pure function of (seed, position).

The one idea: the documents of a split lie end to end as one stream of N tokens, and window j of it covers the tokens
j*S to j*S + S, both included: S inputs and, one token later, S labels. Neighbouring windows share one token, so in an
epoch each token after the first is a label exactly once, except for the tail of fewer than S tokens that fills no
window: (N - 1) // S samples an epoch. Sample i is window p(i mod n) of epoch i // n, where p is a permutation computed
for one index at a time from (seed, epoch). Nothing is stored, built or cached, so the position of a run in its data is
one integer, the samples consumed, whatever the layout, the batch size or the length of the run.

Samples are read in the training process; there are no loader workers whose state could be lost. Shapes: S tokens of a
sample, B samples of a microbatch. The files are indexed.py's, text and tokenizers corpus.py's and tokenizer.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron3d.config import ConfigError, DataConfig, ModelConfig
from megatron3d.indexed import CHUNK, IndexedDataset
from megatron3d.keys import key64
from megatron3d.tokenizer import load_tokenizer
from megatron3d.validate import split_shares

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int64]

IGNORE = -100
"""Label of a position that takes no part in the loss; any negative label does."""

CHECKED_TOKENS = 100_000_000
"""Tokens whose ids are looked at when a set is opened, a fraction of a second; those beyond, when they are read."""

SPLITS = ("training", "validation", "test")
MOCK_VALID_SAMPLES = 256
"""Samples of a generated validation set; generated training data is endless."""

ROUNDS = 6  # of the Feistel network; four already mix well, and six cost little beside reading a sample
SMALLEST_HALF = 3  # bits; with 1 or 2 the orders of up to 8 samples are visibly not equally frequent
_MASK = 2**64 - 1


class Dataset(Protocol):
    """Samples by number."""

    @property
    def size(self) -> int:
        """Samples in one epoch; 0: endless, without epochs."""

    @property
    def seq_length(self) -> int:
        """Tokens of a sample, S."""

    def sample(self, index: int) -> tuple[Ids, Ids]:
        """(tokens, labels), (S,) each; from `size` on, the samples of later epochs."""


class Datasets(NamedTuple):
    """What a run reads."""

    train: Dataset
    valid: Dataset | None
    no_valid_reason: str  # why `valid` is None, for the user; else empty


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """The windows of a range of documents, in an order keyed by the seed."""

    indexed: IndexedDataset
    documents: range
    seq_length: int
    seed: int
    vocab_size: int

    @property
    def size(self) -> int:
        """Whole windows in the documents: samples of an epoch."""
        first, end = (self.indexed.start(document) for document in (self.documents.start, self.documents.stop))
        return num_windows(end - first, self.seq_length)

    def sample(self, index: int) -> tuple[Ids, Ids]:
        """(tokens, labels), (S,) each. ConfigError for an id outside the vocabulary."""
        window = sample_window(index, self.size, self.seed)
        first = self.indexed.start(self.documents.start) + window * self.seq_length
        last = first + self.seq_length + 1
        _check_ids(self.indexed, first, last, self.vocab_size)
        ids = self.indexed.tokens[first:last].astype(np.int64)
        return ids[:-1], ids[1:]


@dataclass(frozen=True, kw_only=True)
class MockDataset:
    """Generated samples that need no files and can be learnt: each counts upwards, modulo the vocabulary, from a start
    and with a step of 1 to 4 that follow from (seed, index)."""

    vocab_size: int
    seq_length: int
    seed: int
    size: int = 0

    def sample(self, index: int) -> tuple[Ids, Ids]:
        """(tokens, labels), (S,) each, of ids below the vocabulary."""
        key = key64(self.seed, "mock sample", index % self.size if self.size else index)
        start, step = (key >> 2) % self.vocab_size, 1 + key % 4
        ids = (start + step * np.arange(self.seq_length + 1, dtype=np.int64)) % self.vocab_size
        return ids[:-1], ids[1:]


@dataclass(frozen=True)
class OnePass:
    """A dataset read once, for evaluation: past its end come samples without a single label inside the loss.

    So the last global batch can be as large as the others, and a mean over valid tokens counts each sample once.
    """

    dataset: Dataset

    @property
    def size(self) -> int:
        """That of the dataset."""
        return self.dataset.size

    @property
    def seq_length(self) -> int:
        """That of the dataset."""
        return self.dataset.seq_length

    def sample(self, index: int) -> tuple[Ids, Ids]:
        """(tokens, labels), (S,) each: the dataset's, or zeros and IGNORE from `size` on."""
        if self.size and index >= self.size:
            return np.zeros(self.seq_length, np.int64), np.full(self.seq_length, IGNORE, np.int64)
        return self.dataset.sample(index)


def open_datasets(data: DataConfig, model: ModelConfig, seed: int) -> Datasets:
    """The training and the validation set of a run.

    Raises ConfigError for a damaged pair of files, for an id outside the vocabulary among the first CHECKED_TOKENS, and
    for training documents that do not fill one sample. A validation split that does not fill one is None, with the
    reason.
    """
    if data.mock_data:
        train, valid = (
            MockDataset(vocab_size=model.vocab_size, seq_length=model.seq_length, seed=key64(seed, name), size=size)
            for name, size in zip(SPLITS[:2], (0, MOCK_VALID_SAMPLES), strict=True)
        )
        return Datasets(train, valid, "")
    _check_tokenizer(data.tokenizer, model.vocab_size)
    indexed = IndexedDataset(data.data_path)
    _check_ids(indexed, 0, min(len(indexed.tokens), CHECKED_TOKENS), model.vocab_size)
    parts = [
        TokenDataset(
            indexed=indexed, documents=part, seq_length=model.seq_length, seed=seed, vocab_size=model.vocab_size
        )
        for part in split_documents(data.split, indexed.num_documents)
    ]
    if parts[0].size == 0:
        raise ConfigError(
            f"{_too_small(parts[0], 0, data.split)} Use more text, a shorter --seq-length or other shares."
        )
    if parts[1].size == 0:
        return Datasets(parts[0], None, _too_small(parts[1], 1, data.split))
    return Datasets(parts[0], parts[1], "")


def _check_ids(indexed: IndexedDataset, first: int, last: int, vocab_size: int) -> None:
    """Refuses an id outside the vocabulary among the tokens [first, last)."""
    for start in range(first, last, CHUNK):
        ids = indexed.tokens[start : min(start + CHUNK, last)]
        if ids.min() >= 0 and ids.max() < vocab_size:
            continue
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise ConfigError(
            f"The data at {indexed.prefix} have the token id {ids[at]} (at position {start + at}, in document "
            f"{indexed.document_at(start + at)}), but the model's vocabulary has {vocab_size} ids, 0 to "
            f"{vocab_size - 1}. Use data written with the model's tokenizer, or a --vocab-size of at least the "
            f"tokenizer's."
        )


def _check_tokenizer(spec: str, vocab_size: int) -> None:
    """Refuses a tokenizer, kept with the run for sampling, that has ids the model has not."""
    if spec and (needed := load_tokenizer(spec).vocab_size) > vocab_size:
        raise ConfigError(
            f"--tokenizer {spec} has {needed} ids, but --vocab-size is {vocab_size}. Give a vocabulary of at least "
            f"{needed}, or the tokenizer the data were written with."
        )


def _too_small(part: TokenDataset, which: int, split: str) -> str:
    indexed, documents = part.indexed, part.documents
    tokens = indexed.start(documents.stop) - indexed.start(documents.start)
    return (
        f"The {SPLITS[which]} split of {indexed.prefix} has no sample: --split {split} gives it {len(documents)} of "
        f"{indexed.num_documents} documents with {tokens} tokens, and one sample needs {part.seq_length + 1}."
    )


def split_documents(shares: str, num_documents: int) -> tuple[range, range, range]:
    """The documents of training, validation and test: consecutive ranges in proportion to `shares`, e.g. "969,30,1".

    Bounds are the running sums of the shares, each rounded to the nearest document. ConfigError as `split_shares`.
    """
    parts = split_shares(shares)
    bounds = [round(num_documents * part / sum(parts)) for part in accumulate(parts, initial=Fraction(0))]
    train, valid, test = (range(first, end) for first, end in pairwise(bounds))
    return train, valid, test


def num_windows(num_tokens: int, seq_length: int) -> int:
    """Samples in a stream of tokens: whole windows of seq_length + 1 tokens that share their end tokens."""
    return max(0, num_tokens - 1) // seq_length


def sample_window(index: int, size: int, seed: int) -> int:
    """The window, of `size`, that sample `index` reads: each window once an epoch, in a new order each epoch."""
    epoch, position = divmod(index, size)
    return permute(position, size, key64(seed, "sample order", epoch))


def permute(position: int, size: int, key: int) -> int:
    """Image of `position` under the permutation of range(size) that belongs to a 64-bit key.

    A Feistel network permutes numbers of 2h bits whatever its round function is. 2h is chosen so that `size` fits;
    while the image lies outside the range it is mapped again, which ends inside because the walk is a cycle through
    `position`. In integers alone, hence the same everywhere, in constant memory and a few microseconds.
    """
    half = max(SMALLEST_HALF, (size - 1).bit_length() + 1 >> 1)
    low = (1 << half) - 1
    keys = [_mix(key + number) for number in range(ROUNDS)]
    while True:
        left, right = position >> half, position & low
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & low)
        position = left << half | right
        if position < size:
            return position


def _mix(value: int) -> int:
    """Scramble 64 bits: multiplications spread low bits upwards, shifts bring high bits down (SplitMix64's finish)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def microbatch_start(
    consumed: int, dp_rank: int, index: int, *, global_batch_size: int, micro_batch_size: int, dp: int
) -> int:
    """First sample of a rank's `index`-th microbatch of the global batch that begins at sample `consumed`.

    The global batch is the samples consumed, consumed + 1, ...; each data-parallel rank has an equal consecutive share
    of it, cut into consecutive microbatches.
    """
    return consumed + dp_rank * (global_batch_size // dp) + index * micro_batch_size


def num_eval_batches(size: int, global_batch_size: int, eval_steps: int) -> int:
    """Global batches of one evaluation: `eval_steps`, or as many as the set fills if those are fewer.

    0 for `eval_steps` is the whole set, 0 for `size` an endless one. The k-th batch covers the samples from
    k * global_batch_size on; what lies past the end is padding (see OnePass).
    """
    whole = -(-size // global_batch_size)
    return min(eval_steps, whole) if eval_steps and size else max(eval_steps, whole)


def load_microbatch(dataset: Dataset, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels) of `size` consecutive samples, sequence first: contiguous int64, (S, B) each."""
    import torch  # late: whether the files are fit for the run is known without it

    samples = [dataset.sample(index) for index in range(first, first + size)]
    tokens, labels = (torch.from_numpy(np.stack(rows, axis=1)) for rows in zip(*samples, strict=True))
    return tokens, labels
