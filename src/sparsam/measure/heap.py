"""Keeps freed memory for the next tensor, in huge pages. A setting of the whole process: programs call it, not layers.

Not for limiting memory: what a process once used stays with it until it ends.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_heap"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # mallopt(3)
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20
_TOP_PAD_BYTES = 64 << 20


def keep_heap(reserve_bytes: int | None = None) -> bool:
    """Makes the C allocator keep what is freed, and backs it with huge pages where Linux allows it.

    By default glibc gives every tensor above 32 MB, and many below, back to the system when it dies and asks for fresh
    pages for the next one. Each page is then faulted in and cleared again: for a 16 MB output that takes as long as
    a dense product that fills it. Small pages cost address translations on top.

    Args:
        reserve_bytes: address space to mark for huge pages; memory is used only when touched. Default: a quarter of
            the machine's memory.

    Returns:
        True when it took effect; False where the allocator is not glibc's, or the address space is not to be had.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    if reserve_bytes is None:
        reserve_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    kept = libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1))
    if not (kept and libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)):
        return False
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.malloc(reserve_bytes)  # the heap grows to this size once and stays so
    if not start:
        return False
    aligned = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = (start + reserve_bytes - aligned) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if length > 0:
        libc.madvise(aligned, length, _MADV_HUGEPAGE)  # without huge pages the rest still helps
    libc.free(start)
    return True
