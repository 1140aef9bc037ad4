"""The dense peak of GPUs by name, to tell which share of it a forward pass reaches."""

from __future__ import annotations

DENSE_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "A100": 312.0,
}
"""bfloat16, without sparsity, from the makers' data sheets. The first name that a device's name contains counts
(that of a GH200 contains H200)."""


def peak_flops(name: str) -> float | None:
    """FLOP/s of dense bfloat16 products on the GPU that calls itself ``name``; None for one that is not known here."""
    found = next((tflops for chip, tflops in DENSE_TFLOPS.items() if chip in name), None)
    return None if found is None else found * 1e12
