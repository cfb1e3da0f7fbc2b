"""Output layer, log-probs and policy loss in one pass over the tokens: docs/kernels.md."""
