"""The equivalence kit: does a model say the same, whatever its cache went through?

One set of prompts is served cold, then through every scenario, and each generated token's logits are compared.
"""
