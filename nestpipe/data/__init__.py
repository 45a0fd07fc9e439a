"""Logs -> sequences -> batches."""
