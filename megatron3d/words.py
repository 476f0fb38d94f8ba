"""Pieces of the sentences in which a user's mistake is explained.

The one idea: every refusal names legal choices in the same form, so lists, divisors and near misses are worded here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence

MOST_CHOICES = 12  # of a list: more are shortened, the last stays


def flag(name: str) -> str:
    """num_layers -> --num-layers."""
    return f"--{name.replace('_', '-')}"


def listed(items: Iterable[object], word: str) -> str:
    """(1, 2, 4) -> "1, 2 or 4" for the word "or"."""
    *head, last = map(str, items)
    return f"{', '.join(head)} {word} {last}" if head else last


def divisors(number: int) -> str:
    """4 -> "1, 2 or 4"; long lists are shortened."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    sizes = sorted({*small, *(number // size for size in small)})
    return listed(sizes if len(sizes) <= MOST_CHOICES else [*sizes[: MOST_CHOICES - 1], "...", sizes[-1]], "or")


def commas(numbers: Sequence[int]) -> str:
    """(3, 1) -> "3,1"."""
    return ",".join(map(str, numbers))


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A sentence with the nearest known word, or nothing if none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
