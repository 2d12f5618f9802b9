"""Store and read of the index-K cache: reference, torch twins, Triton kernels, and their checks."""
