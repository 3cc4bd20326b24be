"""What is computed row by row on a chunk's logits, by one of several backends."""
