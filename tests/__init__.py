"""The tests; ``python -m tests.mask_vectors`` also runs vector files from elsewhere."""
