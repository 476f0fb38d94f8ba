"""Lists of legal choices: complete where short, bounded in time and length where not."""

from __future__ import annotations

import pytest

from megatron3d.words import MOST_CHOICES, divisors


@pytest.mark.parametrize("number", [*range(1, 61), 2**11, 71**2])
def test_short_lists_of_divisors_are_complete(number: int) -> None:
    *head, last = [str(size) for size in range(1, number + 1) if number % size == 0]
    assert len(head) < MOST_CHOICES
    assert divisors(number) == (f"{', '.join(head)} or {last}" if head else last)


def test_large_numbers_neither_hang_nor_flood() -> None:
    assert divisors(1_000_000_007) == "1 or 1000000007"
    assert divisors(10**12) == "1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, ... or 1000000000000"
    assert divisors(720720).count(",") == MOST_CHOICES - 1
