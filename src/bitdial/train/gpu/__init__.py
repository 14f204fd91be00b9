"""The joint step on a GPU: fused layers, CUDA graphs, plans in slots."""
