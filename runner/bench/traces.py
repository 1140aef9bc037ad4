"""Published traces as plans: who asked when, with how many tokens, and which blocks of prompts were the same.

Promises   equal hash ids become equal tokens; a trace without ids becomes prompts that share nothing. A line that is
           not of the format is an error with its number, never a request left out.
"""

from __future__ import annotations

from runner.bench.names import TraceFormat

__all__ = ["TraceFormat"]
