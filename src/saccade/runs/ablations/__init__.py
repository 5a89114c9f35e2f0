"""Small-scale ablations: sets of tiny runs on the same synthetic data, from the same initial weights."""
