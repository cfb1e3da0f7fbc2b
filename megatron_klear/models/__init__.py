"""Models on Megatron-Core and their mapping to Hugging Face checkpoints."""

import megatron_klear.parallel  # noqa: F401  silences Megatron's import noise before anything here imports Megatron
