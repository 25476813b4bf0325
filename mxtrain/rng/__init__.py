"""Random numbers derived from the job's seed, a layer's name and the position in training."""
