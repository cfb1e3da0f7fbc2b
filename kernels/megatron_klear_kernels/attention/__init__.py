"""Attention in C, float32 on a CPU: of packed short sequences, and of one new token a sequence."""
