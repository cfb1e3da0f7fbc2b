"""Before a run starts: what it will need and cost."""
