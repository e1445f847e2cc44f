"""What an integral is and how sure we are of it: nodes, Markov chains, normalisers with error bars."""

__all__: list[str] = []
