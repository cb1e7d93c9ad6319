"""Readers of checkpoints that other tools quantized.

A reader returns a `ThirdPartyCheckpoint`: the content of a float checkpoint of the model, by its names there,
with an `IntegerWeight` for each weight that the tool quantized.  transformers' own conversions then bring
names and shapes to those of the model (experts stacked, halves joined), and `ThirdPartyLoader` packs a layer
as soon as it has all of its weights.  Readers are listed in `registry`.  A reader raises ValueError for a
tensor or a setting that it cannot read, with its name and the reason.
"""
