"""Small kernels beside attention: write K and V, checksum blocks.

Each has a Triton kernel (``triton_*.py``, imported only when it runs) and a reference in torch or NumPy next to its
public function. The reference runs without Triton or CUDA. Both give the same bits: every rounding is spelled out, so
Triton's interpreter on a CPU can prove it (tests/kernels).
"""

from kvtier.attention.kernels.checksum import checksum_blocks
from kvtier.attention.kernels.write_kv import write_kv

__all__ = ["checksum_blocks", "write_kv"]
