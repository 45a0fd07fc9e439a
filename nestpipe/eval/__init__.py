"""Evaluation: top-k metrics, label metrics, predictors, comparison of runs."""
