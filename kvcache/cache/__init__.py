"""The cache: match, load and store over the tiers, and the work that runs behind them."""
