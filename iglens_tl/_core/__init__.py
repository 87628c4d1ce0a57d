"""Tensors in, tensors out: this folder imports torch and numpy only."""
