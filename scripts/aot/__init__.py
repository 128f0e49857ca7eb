"""Kernels compiled for GPUs that need not be here: what `scripts/aot_report` lists and the tests compile. In no wheel."""
