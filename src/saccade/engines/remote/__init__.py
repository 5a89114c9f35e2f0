"""The parts of engines whose servers are asked over HTTP: the pool, the greeting, weights; what vLLM and SGLang say."""
