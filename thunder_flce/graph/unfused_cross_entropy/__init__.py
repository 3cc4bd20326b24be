"""Cross-entropy on logits that have other users, and so are materialised anyway."""
