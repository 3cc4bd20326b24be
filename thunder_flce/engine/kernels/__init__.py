"""What is computed row by row on logits, by one of several backends, and what is computed on vectors of rows."""
