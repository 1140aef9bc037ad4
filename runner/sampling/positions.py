"""Positions of several rows' tokens in logits [n, vocab], seen as one line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def positions(rows: Sequence[int], ids: Sequence[npt.ArrayLike], vocabulary: int) -> npt.NDArray[np.int64]:
    """Row ``rows[i]`` has the tokens ``ids[i]``, any number -> int64 [total]. Unknown ids are left out."""
    arrays = [np.asarray(one, np.int64) for one in ids]
    if not arrays:
        return np.empty(0, np.int64)
    starts = np.repeat(np.asarray(rows, np.int64) * vocabulary, [len(one) for one in arrays])
    tokens = np.concatenate(arrays)
    return (starts + tokens)[(tokens >= 0) & (tokens < vocabulary)]
