"""Kernels of megatron-klear: from hidden states to log-probs and policy losses. Knows nothing of Megatron."""
