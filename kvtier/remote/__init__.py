"""The tier behind the host tier: a store that machines share and that survives a restart."""
