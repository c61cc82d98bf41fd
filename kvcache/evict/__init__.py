"""Who leaves. Knows nothing of bytes and I/O."""
