"""Speculative decoding: one step can extend a sequence by several tokens.

A proposer drafts tokens, the next step computes their logits together with those of the known tokens, and the
sampler samples the tokens that it would have sampled anyway.  A draft token that equals the sampled one saves
a step; a wrong one changes no output.
"""
