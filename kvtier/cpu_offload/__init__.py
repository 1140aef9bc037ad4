"""The host tier: which blocks to copy, the copies as state machines, and the engines that move the bytes."""
