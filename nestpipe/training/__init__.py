"""The training loop, its run folder and its trackers."""
