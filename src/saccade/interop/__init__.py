"""Connect Saccade to other evaluation systems."""
