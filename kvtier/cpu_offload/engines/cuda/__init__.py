"""Copies on CUDA streams: driver, link, pinned memory near the GPU, and the kernel for small fragments."""
