"""The tier behind the host tier: a remote that machines share and that survives a restart."""
