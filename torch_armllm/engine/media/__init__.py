"""Images, sound and videos of prompts: opening, bounding and decoding them."""
