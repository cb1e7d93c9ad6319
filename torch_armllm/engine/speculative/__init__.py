"""Guessing tokens ahead, so that one step can bring a sequence forward by several.

A proposer guesses, the engine's next step computes the guesses behind the known tokens, and the sampler
draws the tokens that it would have drawn anyway: a guess that equals one saves a step, none changes a text.
"""
