"""How does memory that histories have left get back to the system?"""

import ctypes


def give_back() -> None:
    """Return what is free in the heap of glibc; other C libraries have nothing to be told.

    Histories are of every size and age, so that what they leave lies between what is in use, and
    glibc keeps it. Takes about 0.1 ms per MB that is returned.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
