"""Loggers of training steps besides metrics.jsonl, one file each."""
