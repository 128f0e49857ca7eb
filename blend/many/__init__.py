"""One corpus precomputed by many: by processes that know nothing of each other, or by the workers of a Ray cluster."""
