"""``kvtier plan``: what a model's KV cache takes and what fits, from its config alone."""

from runner.plan.report import Plan
from runner.plan.run import Options, run

__all__ = ["Options", "Plan", "run"]
