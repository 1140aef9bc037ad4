"""``kvtier plan``: what a model's KV cache takes and what fits, from its config alone; of a trace, what it finds."""

from runner.plan.hits import TraceOptions
from runner.plan.report import Plan
from runner.plan.run import Options, run

__all__ = ["Options", "Plan", "TraceOptions", "run"]
