"""KV events on the wire in vLLM's form, for routers (docs/ROUTING.md, docs/adr/0024)."""
