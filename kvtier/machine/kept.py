"""Deliberately leaked objects: memory that an unfinished copy may still touch, and engines that cannot be stopped.

Promises   objects in ``KEPT`` are not even destroyed when the interpreter ends and empties its modules.
Does not   know why: the code that puts an object there says so.
"""

from __future__ import annotations

import ctypes

KEPT: list[object] = []

ctypes.pythonapi.Py_IncRef(ctypes.py_object(KEPT))  # a reference that is never given back
