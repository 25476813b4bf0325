"""Matrix products with a small result and a long reduction."""
