"""Kernels in Triton. Imported only where one runs: the package works without Triton."""
