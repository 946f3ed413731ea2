"""Claims, experiments, published numbers, expected results; and the bundle made of all."""
