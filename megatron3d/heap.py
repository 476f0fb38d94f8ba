"""How a rank on a CPU keeps its memory: what is freed stays with the process.

The one idea: a step allocates and frees the same megabytes as the last one. glibc returns freed memory to the system,
which hands it out again cleared, page by page; a heap that keeps what it has spares both. On GPUs torch's own allocator
does the same. Pages stay small: products with large ones can be half as slow again (docs/dead_ends.md).
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # <malloc.h>


def keep_freed_memory() -> bool:
    """Sets up this process's heap for training; True where that could be done (Linux with glibc)."""
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "gnu_get_libc_version"):
        return False
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
    libc.mallopt(M_ARENA_MAX, 1)  # and so do those of other threads
    return True
