"""Rewards: format, exact integers, mathematics, functions of your own. Nothing here loads torch."""
