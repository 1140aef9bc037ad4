"""The device tier: its arena and block tables, and the block pools, which serve the host tier as well."""
