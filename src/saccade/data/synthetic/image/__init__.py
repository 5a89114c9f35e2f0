"""Synthetic image datasets: small cards with symbols, questions with exact labels, demonstrations that zoom."""
