"""Keep the memory of large tensors that are freed, for those that come next.

glibc gives it back to the system at once and asks for it anew, page by page, which can take as long as the work on it:
half of the processor time of `bitdial calibrate` for MobileNetV2 was the system's. A process of the command line has
its memory for itself, so it may keep what it had; a library's caller decides that with MALLOC_MMAP_MAX_ and
MALLOC_TRIM_THRESHOLD_.
"""

import ctypes
import os
import platform

# glibc's malloc.h: a setting of `mallopt`, its value, and the variable by which a user sets it.
SETTINGS = {"MALLOC_TRIM_THRESHOLD_": (-1, -1), "MALLOC_MMAP_MAX_": (-4, 0)}


def keep_freed_memory() -> None:
    """Let this process keep freed memory, where the allocator is glibc's and the user has not set it otherwise."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in SETTINGS.values():
            mallopt(setting, value)
