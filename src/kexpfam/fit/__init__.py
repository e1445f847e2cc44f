"""How a density is found: problems and solvers, bases, the convex and the saddle-point way, the search for
settings."""
