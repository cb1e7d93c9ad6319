"""Tensor parallel ranks: their group, what each of them holds, and the messages between them."""
