"""Two libraries on the same work: each in a process and an environment of its own, asked in turns.

`worker_process` starts a worker and asks it, `worker_loop` answers. `kvcache_worker` and `lmcache_worker` do the same
`workload`. `measurements` compares speed and memory, `faults` compares answers after a fault.
"""
