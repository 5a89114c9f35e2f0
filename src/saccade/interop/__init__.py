"""Bridges to other evaluation systems."""
