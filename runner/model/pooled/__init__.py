"""Recurrent layers by FlashInfer's kernels, which go from states to states where these lie in the pools."""
