"""``LLM`` and ``AsyncLLM``, as vLLM users know them."""
