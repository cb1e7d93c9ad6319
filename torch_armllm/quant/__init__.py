"""Weight quantization: schemes, recipes, packed modules, rounding methods, and quantizing in place."""
