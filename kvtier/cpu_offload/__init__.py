"""Copies between device and host: which blocks, their life as state machines, and the engines that move bytes."""
