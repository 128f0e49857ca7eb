"""The decoder: admitted by measurement, driven over chosen rows, its cache, its own full prefill and decoding."""
