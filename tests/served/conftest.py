"""The zoo of tiny models, shared with tests/families."""

from families.conftest import family, quiet

__all__ = ["family", "quiet"]
