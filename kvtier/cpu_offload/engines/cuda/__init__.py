"""Copies on CUDA streams: driver, link, and pinned memory near the GPU."""
