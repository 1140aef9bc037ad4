"""Texts held to a grammar."""
