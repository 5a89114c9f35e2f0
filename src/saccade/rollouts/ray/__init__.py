"""Run episodes in workers of a Ray cluster, with the same results as in this process."""
