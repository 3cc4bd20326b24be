"""What is computed: the loss, its formulas and the checks of its arguments; no thunder, no Triton."""
