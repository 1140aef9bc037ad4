"""What kvtier's connector brings and costs inside vLLM; ``python -m benchmarks.vllm`` in an environment with vLLM."""
