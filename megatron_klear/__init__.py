"""megatron-klear: train reasoning models on Megatron-Core by long chain-of-thought SFT and GPPO."""

__version__ = "0.1.0"
