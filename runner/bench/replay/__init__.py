"""What a cache would have found of requests that are known: the hit rate of a memory, beside what nothing exceeds.

Promises   schedulers, pools and policies are kvtier's own, and whatever they decide holds here too. Only the bytes are
           missing, the answers are given, and copies between the tiers take no time.
Does not   import torch, or know how long anything takes.
"""
