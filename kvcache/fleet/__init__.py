"""What the nodes of a fleet do together: compute each prefix once, and prefetch the most used ones."""
