"""Define the published benchmarks: one file each, read from a local copy and graded by its official rule."""
