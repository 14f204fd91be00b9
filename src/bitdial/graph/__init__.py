"""Models as torch.fx graphs."""
