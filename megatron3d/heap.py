"""How a rank on a CPU keeps its memory: what is freed stays with the process, and lies in large pages.

The one idea: a step allocates and frees the same megabytes as the last one. glibc returns freed memory to the system,
which hands it out again cleared, page by page. A heap that keeps what it has, in pages of 2 MiB, takes 12 % off a step
(docs/performance.md). On GPUs torch's own allocator does the same.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # <malloc.h>
MADV_HUGEPAGE = 14  # <sys/mman.h>
PAGE = 4096


def keep_freed_memory() -> bool:
    """Sets up this process's heap for training; True where that could be done (Linux with glibc).

    Reserves addresses, not memory: a quarter of the machine's size, used only as far as tensors are put there.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "gnu_get_libc_version"):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
    libc.mallopt(M_ARENA_MAX, 1)  # and so do those of other threads
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    block = libc.malloc(size)
    if block is None:
        return False
    first = -(-block // PAGE) * PAGE
    libc.madvise(first, size - PAGE, MADV_HUGEPAGE)  # advice: a system without large pages goes on with small ones
    libc.free(block)
    return True
