"""Chooses what a run leaves open: pipeline settings from counts, a short profile with a cost model, replica groups."""
