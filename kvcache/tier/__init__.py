"""Where records live. A tier knows no other tier and no engine."""
