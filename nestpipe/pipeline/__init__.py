"""The training step: stages, schedules, runner and streams. sequential.py is read first."""
