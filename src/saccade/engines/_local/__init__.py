"""The parts of the local engine: KV cache, prefix cache."""
