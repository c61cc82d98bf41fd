"""The reference engine: model runner, page pool, scheduler, server. Knows no connector."""

import os

# Threads of torch that wait for work spin by default. Where another process wants the same cores each then waits for
# the other's spinning, and a step takes ten to thirty times as long. Read when torch is imported, so it stands here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
