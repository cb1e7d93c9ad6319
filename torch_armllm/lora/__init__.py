"""LoRA adapters at run time: slots in a model's linear layers, and adapters in PEFT's format to fill them."""
