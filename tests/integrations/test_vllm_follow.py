"""How the connector reads vLLM's block tables and block hashes."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.integrations.vllm.follow import Table
from kvtier.integrations.vllm.geometry import HASH_BYTES, keys_of


def test_a_table_has_no_block_where_vllm_has_its_null_block_or_none_yet() -> None:
    table = Table([0, 0, 7, 8])
    table.append([9])
    assert table.at(np.arange(1, 8)).tolist() == [-1, 7, 8, 9, -1, -1, -1]
    assert table.at(np.array([0, 2, 4])).tolist() == [-1, 7, 9]
    assert table.at(np.array([5, 6])).tolist() == [-1, -1]
    assert len(table.at(np.empty(0, np.int64))) == 0
    assert len(table) == 5


def test_a_table_does_not_share_the_list_that_vllm_goes_on_with() -> None:
    given = [3, 4]
    table = Table(given)
    given[0] = 0
    assert table.at(np.arange(2)).tolist() == [3, 4]


@pytest.mark.parametrize("size", [16, 20, 32])
def test_a_key_is_the_first_128_bits_of_every_so_manieth_hash(size: int) -> None:
    hashes = [bytes([i]) * size for i in range(1, 10)]
    keys = keys_of(hashes, 1, 4, 2)
    assert [row.tobytes() for row in keys] == [bytes([i]) * HASH_BYTES for i in (4, 6, 8)]
    assert keys.flags.c_contiguous
    assert keys_of(hashes, 4, 4, 2).shape == keys_of([], 0, 0, 1).shape == (0, 2)
