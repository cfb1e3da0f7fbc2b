"""From data files to prompts, samples and packed batches."""
