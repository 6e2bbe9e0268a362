"""MOSS-Music: not here yet."""
