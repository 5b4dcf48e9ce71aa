"""What the steps of the matrix are made of."""
