"""Paged attention backends: ``reference`` (torch, any device) and ``flashinfer`` (CUDA). Import the one you need."""
