"""How a live layer multiplies: float, exact, integer or packed."""
