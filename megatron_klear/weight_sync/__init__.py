"""Bringing the trainer's weights to the engines."""
