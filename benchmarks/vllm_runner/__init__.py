"""A real vLLM for benchmarks: its model, and one engine in a process of its own."""
