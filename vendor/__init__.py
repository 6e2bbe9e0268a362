"""Model definitions that transformers lacks, written here for the published architectures."""
