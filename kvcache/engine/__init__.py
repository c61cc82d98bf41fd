"""The reference engine: model runner, page pool, scheduler, server. Knows no connector."""
