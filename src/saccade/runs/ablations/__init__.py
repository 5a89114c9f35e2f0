"""The wind tunnel: sets of small runs, side by side on the same worlds and the same starting weights."""
