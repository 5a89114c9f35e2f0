"""The parts of the local engine: keys and values, what is kept of them, and the scheduler."""
