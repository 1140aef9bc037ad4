"""The reference engine: serves hybrid transformers models with kvtier."""

import runner.needle  # noqa: F401  registers its architecture with transformers
from runner.errors import ModelLoadError, RunnerError
from runner.llm import LLM
from runner.outputs import RequestOutput
from runner.sampling import SamplingParams

__all__ = ["LLM", "ModelLoadError", "RequestOutput", "RunnerError", "SamplingParams"]
