"""Sparsam trains PyTorch models on less: public names and nothing else."""

__all__ = ["__version__"]

__version__ = "0.1.0"
