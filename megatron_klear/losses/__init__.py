"""Policy losses, the joint SFT term and advantages. Torch only: no logits, no ranks."""
