"""What p is: kernels, laws, function spaces, networks, and the density that they make."""
