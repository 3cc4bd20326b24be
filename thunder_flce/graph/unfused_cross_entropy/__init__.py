"""Cross-entropy on logits that have other users."""
