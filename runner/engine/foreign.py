"""Other engines' names for options of ``LLM`` that have another name here, or cannot be chosen.

Promises   no import takes long, so that the command line says the same (``commands.foreign_flags``).
"""

from __future__ import annotations

from runner.sampling.foreign import Foreign

_ONE_DEVICE = Foreign("one device serves the model", (1, None))
_HOST = "use host_memory, which is for K and V alone: weights stay on the device"
FOREIGN = {
    "block_size": Foreign("use block_tokens"),
    "max_num_seqs": Foreign("use max_running"),
    "max_num_batched_tokens": Foreign("use max_batched_tokens"),
    "gpu_memory_utilization": Foreign("use device_memory, such as '8GiB'; without it a share of what is free is taken"),
    "kv_cache_memory_bytes": Foreign("use device_memory"),
    "num_gpu_blocks_override": Foreign("use device_memory={group: blocks}", (None,)),
    "device_bytes": Foreign("use device_memory"),
    "device_blocks": Foreign("use device_memory"),
    "host_bytes": Foreign("use host_memory"),
    "host_blocks": Foreign("use host_memory"),
    "store_uri": Foreign("use remote_uri"),
    "swap_space": Foreign("use host_memory"),
    "cpu_offload_gb": Foreign(_HOST, (0, None)),
    "kv_offloading_size": Foreign("use host_memory", (None,)),
    "kv_transfer_config": Foreign("use host_memory", (None,)),
    "enforce_eager": Foreign("use cuda_graphs=False", (False,)),
    "attention_backend": Foreign("use attention", (None,)),
    "max_model_len": Foreign("requests may be as long as the model's positions and the pools allow", (None,)),
    "tokenizer": Foreign("the tokenizer is the one in the model's folder; or give token ids", (None,)),
    "tokenizer_mode": Foreign("the tokenizer is the one in the model's folder", ("auto",)),
    "skip_tokenizer_init": Foreign("prompts may be token ids all the same", (False,)),
    "seed": Foreign("use SamplingParams(seed=...), for each request", (None,)),
    "trust_remote_code": Foreign("only transformers' own code runs, none that a checkpoint brings along", (False,)),
    "revision": Foreign("give the folder that `hf download ID --revision REVISION` names", (None,)),
    "download_dir": Foreign("set HF_HOME", (None,)),
    "load_format": Foreign("weights are read from safetensors, or from a GGUF file", ("auto", "safetensors", "gguf")),
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "enable_prefix_caching": Foreign("it is always on; prompts of different cache_salt share nothing", (True,)),
    "enable_chunked_prefill": Foreign("it is always on; chunks are of max_batched_tokens", (True,)),
    "disable_hybrid_kv_cache_manager": Foreign("groups of layers are always told apart", (False, None)),
    "quantization": Foreign("weights are served as dtype says; K and V may be kv_cache_dtype='fp8'", (None,)),
    "enable_lora": Foreign("adapters are not served", (False,)),
    "speculative_config": Foreign("nothing is speculated", (None,)),
    "disable_log_stats": Foreign("nothing is logged; LLM.stats() tells", (True, False)),
}
"""vLLM's arguments, arguments of ``KVCache`` that have other names in ``LLM``, and a former name."""
