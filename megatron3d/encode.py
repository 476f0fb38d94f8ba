"""From documents to token ids, in worker processes.

The one idea: documents travel in batches, batches return in the order in which they left, and a batch is encoded by a
pure function of its bytes. So the result is the same for any number of workers, and so is the first error.

corpus.py reads the documents, tokenizer.py knows the ids, indexed.py stores them.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron3d.config import ConfigError
from megatron3d.corpus import BadDocument, RawDocument, parse
from megatron3d.indexed import token_dtype
from megatron3d.tokenizer import Tokenizer, load_tokenizer

BATCH_BYTES = 1 << 19  # a tenth of a second's work; a larger document is a batch of its own
BATCHES_AHEAD = 3  # per worker: none waits for the writer, and memory stays bounded


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is done to each document."""

    tokenizer: str
    """`byte`, a SentencePiece .model file, or a tokenizer.json of Hugging Face's."""
    json_key: str
    """Where the text of a JSON line is."""
    append_eod: bool
    """End each document with the tokenizer's end-of-document id."""
    skip_bad: bool
    """Leave out documents that cannot be read instead of raising BadDocument."""


class Encoded(NamedTuple):
    """The documents of a batch that have tokens, and a count of those that have none."""

    ids: NDArray[Any]  # of all documents, end to end
    lengths: list[int]  # of each, in tokens
    num_bytes: int  # of the batch as it stood in its files
    num_empty: int  # documents of nothing but white space
    bad: list[str]  # what was wrong with each document left out

    def documents(self) -> Iterator[NDArray[Any]]:
        """The ids of each document."""
        end = 0
        for length in self.lengths:
            yield self.ids[end : end + length]
            end += length


Encoder = Callable[[list[RawDocument], Recipe], Encoded]


def batched(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    """Consecutive documents, together of about BATCH_BYTES."""
    batch: list[RawDocument] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += len(document.content)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def encode_batch(batch: list[RawDocument], recipe: Recipe) -> Encoded:
    """The token ids of a batch. Empty documents are left out and counted, so are bad ones if the recipe says so."""
    tokenizer = _tokenizer(recipe.tokenizer)
    end = [tokenizer.eod] if recipe.append_eod else []
    ids: list[int] = []
    lengths: list[int] = []
    num_empty, bad = 0, []
    for document in batch:
        try:
            text = parse(document, recipe.json_key)
        except BadDocument as error:
            if not recipe.skip_bad:
                raise
            bad.append(str(error))
            continue
        if not text.strip():
            num_empty += 1
            continue
        before = len(ids)
        ids += tokenizer.encode(text) + end
        lengths.append(len(ids) - before)
    num_bytes = sum(len(document.content) for document in batch)
    return Encoded(np.array(ids, token_dtype(tokenizer.vocab_size)), lengths, num_bytes, num_empty, bad)


def encode_all(
    batches: Iterable[list[RawDocument]], recipe: Recipe, *, workers: int, encoder: Encoder = encode_batch
) -> Iterator[Encoded]:
    """`encoder` of each batch, in order, by `workers` processes.

    Raises what the first failing batch raised, and ConfigError where a worker died.
    """
    # spawn: a fork would copy the threads of a progress display in whatever state they are.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    waiting: deque[tuple[RawDocument, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch[0], pool.submit(encoder, batch, recipe)))
            if len(waiting) > BATCHES_AHEAD * workers:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _result(first: RawDocument, future: Future[Encoded]) -> Encoded:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ConfigError(
            f"A worker process died while the documents from {first.path} (line {first.line}) on were being encoded, "
            f"so the result would be incomplete. Often memory ran out: try fewer --workers."
        ) from None


@functools.cache
def _tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a worker, loaded at its first batch."""
    return load_tokenizer(spec)
