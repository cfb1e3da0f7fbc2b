"""Recipes: frozen, torch-free, every fault of one found before anything is launched."""
