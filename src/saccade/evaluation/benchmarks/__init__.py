"""Published benchmarks: one file each, read from a local copy and scored by its official rule."""
