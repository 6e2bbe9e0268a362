"""Plain functions that look inside a model; each returns a frozen result with its seconds."""
