"""Needle worlds of still pictures: small cards with marks on them, questions with exact labels, traces that zoom."""
