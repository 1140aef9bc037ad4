"""A tiny hybrid model that retrieves, bundled so that a cache can be judged by the answers it leads to.

Four layers (sliding, chunked, sliding, full), 956,928 parameters, built by hand: see ``build``. It reads one fact out
of a long prompt and needs the KV of all three attention kinds to do it. With any of them wrong it says ``unknown``.
Importing this package registers the architecture with transformers' Auto classes.
"""

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from runner.needle.config import CHUNK_TOKENS, WINDOW_TOKENS, NeedleConfig
from runner.needle.modeling import NeedleForCausalLM
from runner.needle.prompts import Needle, NeedlePrompt, make_prompt, usable_length

__all__ = [
    "CHUNK_TOKENS",
    "WINDOW_TOKENS",
    "Needle",
    "NeedleConfig",
    "NeedleForCausalLM",
    "NeedlePrompt",
    "make_prompt",
    "usable_length",
    "weights_path",
]

AutoConfig.register(NeedleConfig.model_type, NeedleConfig, exist_ok=True)
AutoModelForCausalLM.register(NeedleConfig, NeedleForCausalLM, exist_ok=True)


def weights_path() -> Path:
    """The bundled checkpoint: a folder for ``from_pretrained``, built with seed 0."""
    return Path(__file__).parent / "weights"
