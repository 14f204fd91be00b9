"""Live models on integer codes."""
