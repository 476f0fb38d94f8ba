"""data.py: which tokens make sample i, and which samples a rank reads, checked against corpora that can be counted.

Samples are read in the training process, so "number of workers" in the cases below has one value: none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron3d import data
from megatron3d.config import ConfigError, DataConfig, ModelConfig
from megatron3d.data import (
    IGNORE,
    MockDataset,
    OnePass,
    TokenDataset,
    load_microbatch,
    microbatch_start,
    num_eval_batches,
    num_windows,
    open_datasets,
    permute,
    sample_window,
    split_documents,
)
from megatron3d.indexed import IndexedDataset
from megatron3d.keys import key64
from tests.data import idx_tool

SEQ = 5


def counting(prefix: Path, lengths: list[int], **fields: object) -> IndexedDataset:
    """A pair of sequences of the given lengths whose tokens are 0, 1, 2, ... throughout."""
    numbers = itertools.count()
    idx_tool.write(prefix, [list(itertools.islice(numbers, length)) for length in lengths], **fields)  # type: ignore[arg-type]
    return IndexedDataset(str(prefix))


def tokens(indexed: IndexedDataset, documents: range, seed: int = 1, vocab_size: int = 1000) -> TokenDataset:
    """The windows of some documents."""
    return TokenDataset(indexed=indexed, documents=documents, seq_length=SEQ, seed=seed, vocab_size=vocab_size)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 97, 1000, 1024, 1025])
def test_an_epoch_is_a_permutation(size: int) -> None:
    for epoch in range(3):
        assert sorted(permute(position, size, key64(epoch)) for position in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 5, 20])
def test_orders_are_evenly_spread(size: int) -> None:
    """Chi-square of where the first two samples of an epoch come from, over epochs; fixed keys, so never flaky."""
    epochs = 2000
    pairs = Counter(
        (sample_window(epoch * size, size, 7), sample_window(epoch * size + 1, size, 7)) for epoch in range(epochs)
    )
    freedom = size * (size - 1) - 1
    expected = epochs / (freedom + 1)
    chi_square = sum((pairs[pair] - expected) ** 2 / expected for pair in itertools.permutations(range(size), 2))
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_large_sets_need_no_memory_and_the_order_is_pinned() -> None:
    """The order is part of what a seed means: these values never change, on any machine."""
    first_epoch, second_epoch = [1, 3, 6, 5, 2, 7, 0, 8, 4, 9], [7, 2, 6, 9, 0, 1, 8, 3, 5, 4]
    assert [sample_window(index, 10, 1234) for index in range(20)] == first_epoch + second_epoch
    assert [sample_window(index, 10**12, 1234) for index in range(3)] == [832208163452, 779584499277, 423284310260]


def test_order_differs_between_epochs_and_seeds_and_repeats_for_a_seed() -> None:
    """SAMP-03: epochs 1 to 3 have different orders, a second run has the same ones, another seed others."""
    size = 30

    def run(seed: int) -> list[list[int]]:
        return [[sample_window(epoch * size + i, size, seed) for i in range(size)] for epoch in range(3)]

    first, second, other = run(1), run(1), run(2)
    assert first == second
    orders = [*first, *other]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_labels_are_the_next_tokens_and_each_token_is_a_label_once(tmp_path: Path) -> None:
    """DATA-19: on the corpus 0, 1, 2, ..., cut into documents at odd places, labels are inputs shifted by one; in each
    epoch every token after the first is a label exactly once, but for the tail of fewer than S tokens."""
    for total, lengths in [(26, [26]), (26, [1, 7, 0, 11, 7]), (29, [3, 13, 13]), (30, [30]), (31, [10, 21])]:
        dataset = tokens(counting(tmp_path / "set", lengths), range(len(lengths)))
        assert dataset.size == (total - 1) // SEQ == 5 + (total == 31)
        for epoch in range(2):
            labelled = []
            for index in range(epoch * dataset.size, (epoch + 1) * dataset.size):
                inputs, labels = dataset.sample(index)
                assert inputs.tolist() == list(range(inputs[0], inputs[0] + SEQ))
                assert labels.tolist() == (inputs + 1).tolist()
                labelled += labels.tolist()
            assert sorted(labelled) == list(range(1, 1 + dataset.size * SEQ))
        assert total - 1 - dataset.size * SEQ < SEQ


def test_windows_of_a_stream() -> None:
    assert [num_windows(count, 4) for count in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_a_split_reads_its_documents_only(tmp_path: Path) -> None:
    indexed = counting(tmp_path / "set", [4, 9, 0, 8, 6], documents=[0, 1, 3, 5])
    assert indexed.document_sizes.tolist() == [4, 9, 14]
    seen = [tokens(indexed, part) for part in (range(1), range(1, 3), range(3, 3))]
    assert [part.size for part in seen] == [0, 4, 0]
    read = {int(token) for index in range(4) for row in seen[1].sample(index) for token in row}
    assert read == set(range(4, 25))


@pytest.mark.parametrize(
    ("shares", "count", "expected"),
    [
        ("969,30,1", 1000, (969, 999, 1000)),
        ("969,30,1", 731, (708, 730, 731)),
        ("949,50,1", 3, (3, 3, 3)),
        ("1", 7, (7, 7, 7)),
        ("0.5, 0.5", 9, (4, 9, 9)),
        ("100", 7, (7, 7, 7)),
        ("9,1", 10, (9, 10, 10)),
        ("98,2,0", 0, (0, 0, 0)),
    ],
)
def test_split_by_documents(shares: str, count: int, expected: tuple[int, int, int]) -> None:
    parts = split_documents(shares, count)
    assert tuple(part.stop for part in parts) == expected
    assert [index for part in parts for index in part] == list(range(count))


@pytest.mark.parametrize("shares", ["", "a,b", "1,2,3,4", "-1,2,3", "0,0,0", "0,1,1", "1/0", "nan", "inf"])
def test_bad_shares_are_refused(shares: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        split_documents(shares, 10)


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """DATA-14: refused when the data are opened, hence on any layout and before the first step.

    The message names the id, its position and document, the vocabulary and the data; a negative id is as bad.
    """
    model = ModelConfig(vocab_size=131, seq_length=SEQ)
    for bad in (131, 500, -3):
        idx_tool.write(tmp_path / "set", [[1, 2, 3], [], [4, bad, 130]], code=4)
        with pytest.raises(ConfigError) as error:
            open_datasets(DataConfig(data_path=str(tmp_path / "set"), split="1,0,0"), model, 1)
        for part in (f"token id {bad} ", "position 4, in document 2)", "131 ids, 0 to 130", str(tmp_path / "set")):
            assert part in str(error.value)
    idx_tool.write(tmp_path / "set", [[1, 2, 3], [], [4, 0, 130]], code=4)
    open_datasets(DataConfig(data_path=str(tmp_path / "set"), split="1,0,0"), model, 1)


def test_ids_beyond_the_checked_tokens_are_refused_when_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DATA-14: what opening leaves unread in a very large set is still never trained on."""
    monkeypatch.setattr(data, "CHECKED_TOKENS", 2 * SEQ)
    monkeypatch.setattr(data, "CHUNK", 3)  # the bad token is in no first chunk
    counting(tmp_path / "set", [4 * SEQ + 1])
    options = DataConfig(data_path=str(tmp_path / "set"), split="1,0,0")
    with pytest.raises(ConfigError, match=f"token id 9 .at position {2 * SEQ - 1}, in document 0"):
        open_datasets(options, ModelConfig(vocab_size=2 * SEQ - 1, seq_length=SEQ), 1)
    train = open_datasets(options, ModelConfig(vocab_size=2 * SEQ, seq_length=SEQ), 1).train
    for index in range(4):
        if sample_window(index, 4, 1) == 0:
            assert train.sample(index)[0].tolist() == list(range(SEQ))
        else:
            with pytest.raises(ConfigError, match="token id"):
                train.sample(index)


def windows_of_step(
    consumed: int, size: int, *, global_batch_size: int, micro_batch_size: int, dp: int
) -> list[list[int]]:
    """The windows that each data-parallel rank reads in one step."""
    sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size, "dp": dp}
    return [
        [
            sample_window(microbatch_start(consumed, rank, index, **sizes) + row, size, 1)
            for index in range(global_batch_size // (micro_batch_size * dp))
            for row in range(micro_batch_size)
        ]
        for rank in range(dp)
    ]


def test_every_rank_reads_as_much_across_the_end_of_an_epoch() -> None:
    """SAMP-01: 10 samples, micro batch 2, dp 3: equal counts on all ranks, no sample twice within an epoch."""
    size, batch = 10, 6
    read = []
    for step in range(5):  # three epochs
        ranks = windows_of_step(step * batch, size, global_batch_size=batch, micro_batch_size=2, dp=3)
        assert [len(rank) for rank in ranks] == [2, 2, 2]
        read += [window for rank in ranks for window in rank]
    assert [sorted(read[first : first + size]) for first in range(0, 30, size)] == [list(range(size))] * 3


def test_the_global_sequence_is_the_same_for_every_layout() -> None:
    """SAMP-04: saved in mid-epoch at dp 2, resumed at dp 4, 1 or 3: the samples go on as without interruption."""
    size, batch = 25, 12
    uninterrupted = [sample_window(index, size, 1) for index in range(5 * batch)]
    for dp, micro in [(1, 1), (1, 4), (2, 3), (3, 1), (3, 4), (4, 1), (4, 3)]:
        read = []
        for step in range(5):
            now, portion = (2, 2) if step < 2 else (dp, micro)
            ranks = windows_of_step(step * batch, size, global_batch_size=batch, micro_batch_size=portion, dp=now)
            read += [window for rank in ranks for window in rank]
        assert read == uninterrupted


def test_the_position_is_the_number_of_consumed_samples(tmp_path: Path) -> None:
    """SAMP-06: a run killed at step 7 and resumed from step 5 reads in steps 6, 7, ... what an uninterrupted one does.

    A dataset has no state: one opened anew gives the same samples in whatever order they are asked for.
    """
    counting(tmp_path / "set", [101])

    def steps(numbers: range) -> list[list[int]]:
        dataset = tokens(IndexedDataset(str(tmp_path / "set")), range(1))
        return [load_microbatch(dataset, 4 * step, 4)[0][0].tolist() for step in numbers]

    uninterrupted, killed, resumed = steps(range(12)), steps(range(7)), steps(range(5, 12))
    assert killed[:5] + resumed == uninterrupted
    assert steps(range(11, -1, -1)) == uninterrupted[::-1]


def test_a_microbatch_is_sequence_first(tmp_path: Path) -> None:
    dataset = tokens(counting(tmp_path / "set", [101]), range(1))
    batch, labels = load_microbatch(dataset, 18, 3)
    for tensor in (batch, labels):
        assert tensor.shape == (SEQ, 3) and tensor.dtype == torch.int64 and tensor.is_contiguous()
    for column, index in enumerate((18, 19, 20)):  # 20 samples an epoch
        expected = dataset.sample(index)
        assert np.array_equal(batch[:, column].numpy(), expected[0])
        assert np.array_equal(labels[:, column].numpy(), expected[1])


def test_evaluation_reads_each_sample_once(tmp_path: Path) -> None:
    """LOSS-07: nine samples in batches of four: the third batch holds one, its other rows are outside the loss."""
    dataset = OnePass(tokens(counting(tmp_path / "set", [46]), range(1)))
    assert dataset.size == 9 and num_eval_batches(9, 4, 0) == 3
    labelled: list[int] = []
    for batch, rank, index in itertools.product(range(3), range(2), range(2)):
        first = microbatch_start(4 * batch, rank, index, global_batch_size=4, micro_batch_size=1, dp=2)
        inputs, labels = load_microbatch(dataset, first, 1)
        valid = labels[:, 0] >= 0
        assert bool(valid.all()) == (first < 9) and bool(valid.any()) == (first < 9)
        if first >= 9:
            assert (labels == IGNORE).all() and (inputs == 0).all()
        labelled += labels[:, 0][valid].tolist()
    assert sorted(labelled) == list(range(1, 46))


def test_number_of_evaluation_batches() -> None:
    assert [num_eval_batches(9, 4, steps) for steps in (0, 1, 2, 3, 10)] == [3, 1, 2, 3, 3]
    assert num_eval_batches(0, 4, 10) == 10  # an endless set


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 131])
def test_generated_samples_respect_the_vocabulary_and_follow_from_the_index(vocab_size: int) -> None:
    dataset = MockDataset(vocab_size=vocab_size, seq_length=SEQ, seed=3)
    again = MockDataset(vocab_size=vocab_size, seq_length=SEQ, seed=3)
    rows: list[NDArray[np.int64]] = []
    for index in range(50):
        inputs, labels = dataset.sample(index)
        assert inputs.shape == labels.shape == (SEQ,)
        assert min(inputs.min(), labels.min()) >= 0 and max(inputs.max(), labels.max()) < vocab_size
        assert np.array_equal(inputs[1:], labels[:-1])
        steps = (labels - inputs) % vocab_size
        assert (steps == steps[0]).all() and steps[0] in {step % vocab_size for step in (1, 2, 3, 4)}
        assert np.array_equal(again.sample(index)[0], inputs)
        rows.append(inputs)
    if vocab_size == 131:
        assert len({tuple(row) for row in rows}) > 40
        assert len({int(row[0]) for row in rows}) > 25


def test_opening_mock_data_needs_no_files() -> None:
    train, valid, reason = open_datasets(DataConfig(mock_data=True), ModelConfig(vocab_size=131, seq_length=SEQ), 1)
    assert valid is not None and (train.size, valid.size, reason) == (0, 256, "")
    assert not np.array_equal(train.sample(0)[0], valid.sample(0)[0])
    assert np.array_equal(valid.sample(256)[0], valid.sample(0)[0])


def opened(prefix: Path, split: str) -> tuple[int, int | None, str]:
    """(training samples, validation samples, reason) of a set under a split."""
    options = DataConfig(data_path=str(prefix), split=split)
    train, valid, reason = open_datasets(options, ModelConfig(vocab_size=1000, seq_length=SEQ), 1)
    return train.size, None if valid is None else valid.size, reason


def test_a_split_without_samples_is_told(tmp_path: Path) -> None:
    """DATA-18: no validation set is a reason to tell, no training set an error; both with the numbers."""
    counting(tmp_path / "set", [21, 21, 4])
    assert opened(tmp_path / "set", "1,2,0") == (4, 4, "")
    train, valid, reason = opened(tmp_path / "set", "949,50,1")
    assert (train, valid) == (9, None)
    assert "validation" in reason and "0 of 3 documents with 0 tokens" in reason and "needs 6" in reason
    train, valid, reason = opened(tmp_path / "set", "2,1,0")
    assert (train, valid) == (8, None)
    assert "1 of 3 documents with 4 tokens" in reason
    with pytest.raises(ConfigError, match=r"training split .* 0 of 3 documents with 0 tokens, and one sample needs 6"):
        opened(tmp_path / "set", "1,99,0")
