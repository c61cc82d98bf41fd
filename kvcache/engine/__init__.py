"""The reference engine: model runner, page pool, scheduler, server. It depends on no connector."""

import os

# Waiting threads of torch spin by default. Where another process uses the same cores, each waits for the other's
# spinning, and a step takes ten to thirty times as long. torch reads this when it is imported, so it is set here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
