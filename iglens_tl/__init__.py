"""Exact layer-by-layer probability attribution for TransformerLens."""
