"""Training on a GPU: steps as CUDA graphs, and runs that differ only in seed and learning rate as one."""
