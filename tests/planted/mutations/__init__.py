"""The mutations as data: plausible mistakes that import, run, and are wrong. ``python -m tests.planted`` plants them.

``tests`` are the modules that are most likely to see the mistake, in the order in which they are run; what they do not
see is run against the rest of the core suite. A mistake that takes more than one edit has the others in ``also``.
"""

from __future__ import annotations

from . import attention, checks, copies, cuda, kernels, lookup, pools, scheduling, server, slabs, steps, what_fits
from .base import Mutation

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS = (
    *attention.MUTATIONS,
    *checks.MUTATIONS,
    *copies.MUTATIONS,
    *cuda.MUTATIONS,
    *kernels.MUTATIONS,
    *lookup.MUTATIONS,
    *pools.MUTATIONS,
    *scheduling.MUTATIONS,
    *server.MUTATIONS,
    *slabs.MUTATIONS,
    *steps.MUTATIONS,
    *what_fits.MUTATIONS,
)
