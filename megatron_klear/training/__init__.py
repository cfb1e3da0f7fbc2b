"""Policies, loops and what is seen of them."""

import megatron_klear.parallel  # noqa: F401  silences Megatron's import noise before anything here imports Megatron
