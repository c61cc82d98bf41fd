"""What the nodes of a fleet do together: who computes a prefix that nobody has, and which are worth fetching."""
