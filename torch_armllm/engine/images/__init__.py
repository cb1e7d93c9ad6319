"""Pictures in prompts: reading them, and the embeddings that stand for them."""
