"""The scorer: plans packed trees over a trace and computes a teacher's signals at every sampled token.

`plan` needs numpy only; everything else needs the extra `[score]`.
"""
