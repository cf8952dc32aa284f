"""What is connected: patterns, scores, methods, the layers that store blocks only, and the part that rewires them."""
