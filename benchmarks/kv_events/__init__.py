"""What KV events cost: the engine's thread, and the publisher's."""
