"""The equivalence kit inside vLLM: does a model say the same with a KV connector as without one?

``kit`` runs in the command's process, and ``child`` in two processes of its own: the reference engine without a
connector, then the engine with it. Only ``engine`` knows vLLM, and nothing here knows a connector.
The child's modules import neither numba nor torch: vLLM must be the first to do so in its processes.
"""
