"""An open-loop load generator for any server that speaks OpenAI's API.

``workloads`` and ``traces`` make a plan: which prompts, how many tokens, when. ``drive`` sends it on time through
``client``, and writes what happened to ``record``. ``figures`` counts, ``report`` and ``plot`` show. ``replay`` asks no
server: it says what a cache would find of a trace.

Promises   the same parameters and seed make the same plan, byte by byte. Nothing here imports torch.
           A request is sent when the plan says so, however slow the server is; what was late is measured and told.
Does not   start or configure servers.
"""
