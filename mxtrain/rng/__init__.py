"""Random numbers that follow from the job's seed, a layer's name and the place in training."""
