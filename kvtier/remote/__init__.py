"""The remote tier, behind the host tier: objects that machines share and that survive a restart."""
