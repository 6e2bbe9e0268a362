"""MOSS-Audio-Tokenizer v2: not here yet."""
