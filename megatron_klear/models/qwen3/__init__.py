"""Dense Qwen3."""
