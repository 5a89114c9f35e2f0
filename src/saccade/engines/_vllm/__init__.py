"""The parts of the vLLM engine: servers and their pool, what goes over the wire, weights, and the server's process."""
