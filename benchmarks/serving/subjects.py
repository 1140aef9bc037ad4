"""Who serves: kvtier, and transformers' two ways. Each takes token ids and gives token ids, greedily, EOS ignored."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from runner import LLM, SamplingParams
from runner.model.place import find_gguf

Prompts = Sequence[list[int]]


class Subject(Protocol):
    """One way to serve."""

    name: str

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """The new tokens of each prompt, all served together."""

    def first_token_s(self, prompt: list[int]) -> float:
        """CPU seconds to the first token of one prompt that was never seen."""


class Kvtier:
    """``LLM``, with whatever is cached from before."""

    name = "kvtier"

    def __init__(self, model: Path, max_running: int, device_memory: Any, host_memory: Any) -> None:
        self.llm = LLM(model, "cpu", device_memory, host_memory, max_running=max_running, dtype="float32")
        for group in self.llm.cache.spec.groups:  # a server's pool has been written: no page is new to the machine
            for layer in range(group.num_layers):
                for view in self.llm.cache.kv(group.name, layer):
                    view.zero_()

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        return [output.token_ids for output in self.llm.generate(list(prompts), params, use_tqdm=False)]

    def first_token_s(self, prompt: list[int]) -> float:
        return cpu_seconds(lambda: self.serve([prompt], 1))


class Generate:
    """``generate`` of a padded batch, with transformers' own cache; nothing is kept between calls."""

    name = "transformers generate"

    def __init__(self, model: Any) -> None:
        self._model = model

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(input_ids=ids, attention_mask=mask, generation_config=_greedy(new_tokens))
        return [row[longest:].tolist() for row in out]

    def first_token_s(self, prompt: list[int]) -> float:
        return cpu_seconds(lambda: self.serve([prompt], 1))


class Continuous:
    """``generate_batch``, transformers' continuous batching over its paged cache."""

    name = "transformers generate_batch"

    def __init__(self, model: Any) -> None:
        self._model = model

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        with torch.inference_mode():
            done = self._model.generate_batch([*prompts], generation_config=_greedy(new_tokens), warmup=False)
        rows = sorted(done.values(), key=lambda output: int("".join(filter(str.isdigit, output.request_id)) or 0))
        return [output.generated_tokens for output in rows]

    def first_token_s(self, prompt: list[int]) -> float:
        return cpu_seconds(lambda: self.serve([prompt], 1))


def transformers_model(path: Path) -> Any:
    """The same weights in transformers, with PyTorch's attention."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    file = find_gguf(path)
    if file is not None:
        options["gguf_file"] = file.name
        path = file.parent
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of this process, all its threads."""
    gc.collect()
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _greedy(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
    )


def note(text: str) -> None:
    """To stderr: what is being done."""
    print(text, file=sys.stderr, flush=True)
