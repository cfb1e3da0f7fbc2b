"""Kernels of megatron-klear: hidden states to policy losses, norms, SwiGLU, rotation. Knows nothing of Megatron."""
