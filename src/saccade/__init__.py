"""Saccade: train vision-language models that decide where to look."""

__version__ = "0.1.0"
