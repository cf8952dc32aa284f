"""Fewer bytes while training: recomputed and offloaded activations, and what is kept, counted."""
