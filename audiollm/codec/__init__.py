"""MOSS-Audio-Tokenizer v2, codes to 48 kHz stereo: not here yet."""
