"""The only folder that knows TransformerLens: what a model is, its states, its readout, its tokens."""
