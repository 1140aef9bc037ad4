"""Hit rates of a cache on workloads of chats, agents and stems, with real schedulers and pools."""
