"""Models that pool: texts become vectors, class probabilities or scores, instead of further tokens."""
