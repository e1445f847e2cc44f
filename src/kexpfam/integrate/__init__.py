"""Integrals under the base measure: quadrature nodes, Markov chains, and normalisers with standard errors."""
