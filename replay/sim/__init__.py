"""A simulated LLM server: it serves the OpenAI API, and computes (not mocks) cache hits, queueing and preemption.

presets.py  what the GPU and the model are         cache.py    paged KV blocks with prefix caching (pure)
engine.py   scheduler in virtual time (pure)       api.py      request bodies in, response bytes out (pure)
metrics.py  vLLM's metric names                    server.py   HTTP, and the loop that ties virtual time to the clock
"""
