"""Trackers: who is told of each step beside metrics.jsonl, one file each."""
