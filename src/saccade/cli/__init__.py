"""Commands by noun; cli.py puts them together."""
