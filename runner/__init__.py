"""The reference engine: serves hybrid transformers models with kvtier."""

from runner.errors import ModelLoadError, RunnerError
from runner.llm import LLM
from runner.outputs import RequestOutput
from runner.sampling import SamplingParams

__all__ = ["LLM", "ModelLoadError", "RequestOutput", "RunnerError", "SamplingParams"]
