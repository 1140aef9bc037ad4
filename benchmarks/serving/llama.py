"""llama.cpp as one who serves: ``xllamacpp`` from the package index, with a GGUF file's weights in float32.

Its K and V are float32 too, and it computes with one thread, so that it does the work of the others. Packed weights
would be other weights: kvtier and transformers unpack them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.subjects import Prompts

MOST_TOGETHER = 64
MOST_TOKENS = 36_864
"""Of all contexts that are there at once."""
F32 = 0
"""ggml's number of the type."""


class Llama:
    """llama.cpp's server without its HTTP; what is in a slot from before is found again."""

    name = "llama.cpp"
    clock = staticmethod(time.process_time)

    def __init__(self, file: Path) -> None:
        """``file``: with weights in float32. Raises ``ImportError`` without ``xllamacpp``."""
        import xllamacpp

        given: Any = xllamacpp.CommonParams()
        given.model.path = str(file)
        given.n_ctx, given.n_parallel, given.kv_unified = MOST_TOKENS, MOST_TOGETHER, True
        given.cache_type_k = given.cache_type_v = F32
        given.verbosity = given.n_gpu_layers = 0
        for threads in (given.cpuparams, given.cpuparams_batch):
            threads.n_threads, threads.poll = 1, 0
        self._server = xllamacpp.Server(given)
        self._askers = ThreadPoolExecutor(MOST_TOGETHER)

    def serve(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """The new tokens of each prompt."""

        def ask(prompt: list[int]) -> list[int]:
            asked = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "ignore_eos": True}
            answer = self._server.handle_completions(asked | {"return_tokens": True, "verbose": True})
            tokens: list[int] = answer["__verbose"]["tokens"]
            assert len(tokens) == new_tokens, answer
            return tokens

        return list(self._askers.map(ask, prompts))


@contextmanager
def unpacked(source: Path) -> Iterator[Path]:
    """The GGUF file ``source`` with all weights in float32, in a folder that goes at the end."""
    import gguf
    from gguf.quants import dequantize

    read = gguf.GGUFReader(source)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "float32.gguf"
        writer = gguf.GGUFWriter(file, read.fields["general.architecture"].contents())
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        for name, field in read.fields.items():
            if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)
        for tensor in read.tensors:
            weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            writer.add_tensor(tensor.name, weights.reshape(tensor.shape[::-1].tolist()))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield file
