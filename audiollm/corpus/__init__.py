"""Embeddings of many files, resumable: not here yet."""
