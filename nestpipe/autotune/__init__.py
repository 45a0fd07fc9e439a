"""Autotuning of pipeline settings: a cost model, a search over it, and a controller that measures while training."""
