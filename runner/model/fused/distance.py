"""How far apart two results of a trial are."""

from __future__ import annotations

from torch import Tensor


def relative(ours: Tensor, own: Tensor) -> float:
    """The RMS of the difference, of the RMS of ``own``."""
    ours, own = ours.float(), own.float()
    return float((ours - own).square().mean().sqrt() / own.square().mean().sqrt().clamp_min(1e-12))
