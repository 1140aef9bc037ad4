"""Who serves: kvtier, transformers' two ways, vLLM. Each takes token ids and gives token ids, greedily, EOS ignored."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from runner import LLM, SamplingParams
from runner.model.place import find_gguf

Prompts = Sequence[list[int]]


class Subject(Protocol):
    """One way to serve."""

    name: str

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """The new tokens of each prompt, all served together."""

    def clock(self) -> float:
        """CPU seconds of the process that serves, all its threads."""


class Kvtier:
    """``LLM``, with whatever is cached from before."""

    name = "kvtier"
    clock = staticmethod(time.process_time)

    def __init__(self, model: Path, max_running: int, device_memory: Any, host_memory: Any) -> None:
        self.llm = LLM(model, "cpu", device_memory, host_memory, max_running=max_running, dtype="float32")
        for group in self.llm.cache.spec.groups:  # a server's pool has been written: no page is new to the machine
            for layer in range(group.num_layers):
                for view in self.llm.cache.kv(group.name, layer):
                    view.zero_()

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        return [output.token_ids for output in self.llm.generate(list(prompts), params, use_tqdm=False)]


class Generate:
    """``generate`` of a padded batch, with transformers' own cache; nothing is kept between calls."""

    name = "transformers generate"
    clock = staticmethod(time.process_time)

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


class Continuous:
    """``generate_batch``, transformers' continuous batching over its paged cache."""

    name = "transformers generate_batch"
    clock = staticmethod(time.process_time)

    def __init__(self, model: Any) -> None:
        self._model = model

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        with torch.inference_mode():
            done = self._model.generate_batch([*prompts], generation_config=_greedy(new_tokens), warmup=False)
        rows = sorted(done.values(), key=lambda output: int("".join(filter(str.isdigit, output.request_id)) or 0))
        return [output.generated_tokens for output in rows]


def transformers_model(path: Path) -> Any:
    """The same weights in transformers, with PyTorch's attention."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    file = find_gguf(path)
    if file is not None:
        options["gguf_file"] = file.name
        path = file.parent
    model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    model.generation_config.eos_token_id = None  # else ``generate`` takes the second best where it would end
    return model


class Vllm:
    """The vLLM of another Python, in a process of its own, with its prefix cache."""

    name = "vLLM"

    def __init__(self, python: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.vllm.serving", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._clock = 0.0

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([prompts, new_tokens]), file=self._process.stdin, flush=True)
        tokens: list[list[int]]
        tokens, self._clock = json.loads(self._process.stdout.readline())
        return tokens

    def clock(self) -> float:
        return self._clock


@contextmanager
def vllm(python: str | None, model: Any, environment: Mapping[str, str]) -> Iterator[list[Subject]]:
    """The vLLM of ``python`` with the weights of transformers' ``model``, until the end; nobody if there is none."""
    if python is None:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        tied = set(model.all_tied_weights_keys)
        weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        config.pop("quantization_config", None)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        subject = Vllm(python, Path(folder), environment)
        try:
            yield [subject]
        finally:
            subject._process.kill()
            subject._process.wait()


def cpu_seconds(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """What ``work`` takes by ``clock``, a subject's or that of this process."""
    gc.collect()
    begun = clock()
    work()
    return clock() - begun


def _greedy(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
    )


def note(text: str) -> None:
    """To stderr: what is being done."""
    print(text, file=sys.stderr, flush=True)
