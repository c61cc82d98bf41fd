"""What a block is: its layout, its namespace, its key, its record. Knows nothing of where blocks live."""
