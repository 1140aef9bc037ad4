"""Adapters between kvtier and the libraries that describe or run models. The core imports none of them at load time."""
