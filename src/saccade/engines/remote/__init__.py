"""Engines behind HTTP servers: server pool, handshake, weight sync, and the APIs of vLLM and SGLang."""
