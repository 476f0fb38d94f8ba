"""Keys: one 64-bit number for whatever is drawn at random.

The one idea: a random value is a pure function of what it is for, so whoever draws one first names it. What is drawn
from a key is in rng.py (initial values, dropout) and in data.py (the order of samples).
"""

from __future__ import annotations

import hashlib
import json


def key64(*parts: int | str) -> int:
    """A 64-bit key of the parts, equal on every machine; 1 and "1" differ, and so do ("ab", "c") and ("a", "bc")."""
    text = json.dumps(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
