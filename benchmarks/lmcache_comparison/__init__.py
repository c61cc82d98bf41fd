"""Two libraries on the same work: each in a process and an environment of its own, asked in turns.

`side` asks and `worker` answers; `work` is what both do; `ours` and `theirs` do it; `figures` and `truth` compare.
"""
