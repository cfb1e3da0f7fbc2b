"""Output layer, log-prob and policy loss."""
