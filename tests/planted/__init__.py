"""Planted mistakes: small mutations of kvtier's own code, each of which the test suite has to catch."""
