"""Recorded steps: the recorder, exposed time, Perfetto files, timelines."""
