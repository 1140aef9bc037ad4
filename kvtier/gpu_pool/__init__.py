"""Rows: which block holds which tokens of a running request, and the arrays that kernels take."""
