"""Pieces of the sentences in which a user's mistake is explained, and how the last ones are told.

The one idea: every refusal names legal choices in the same form, so lists, divisors and near misses are worded here.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import sys
from collections.abc import Collection, Iterable, Sequence

MOST_CHOICES = 12  # of a list: more are shortened, the last stays
LONGEST = 1_000_000  # characters of a paragraph: a list of every tensor of the largest models, twice
LONGEST_VALUE = 300  # characters of a value that is quoted
VALUES = tuple(map(re.compile, (r"\[[^\[\]]*\]", r"(?<!\w)'[^']*'", r"\S+")))
"""What a value looks like that one can flood: in brackets, in quotes, or in one piece."""


def tell(text: str) -> None:
    """Prints to stderr at once, or the words of several ranks mingle. That nobody hears them any more, since the
    terminal or the launcher has gone, keeps no rank from what it has to do next."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end="", file=sys.stderr, flush=True)


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


def paragraph(text: str) -> str:
    """`text` as one line of printable characters, whatever names and values it quotes. A long value is cut, a list of
    names is not: what is missing is told to the last."""
    line = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text.strip()
    )
    for value in VALUES:
        line = value.sub(lambda found: _ends(found[0], LONGEST_VALUE), line)
    return _ends(line, LONGEST)


def _ends(text: str, most: int) -> str:
    """`text`; of a long one, the first two and the last third of `most` characters."""
    tail = most // 3
    return text if len(text) <= most else f"{text[: most - tail]} [...] {text[-tail:]}"
