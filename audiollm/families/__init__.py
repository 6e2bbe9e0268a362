"""One adapter a model family: prompts, mel, positions, and where a tensor lives in that model."""
