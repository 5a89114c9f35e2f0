"""Reports of runs, benchmarks and ablations: pages, tables, plots, console output and loggers."""
