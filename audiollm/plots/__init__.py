"""Matplotlib figures of what the engine and `audiollm.analysis` compute; computing and drawing are apart."""
