"""Everything that touches thunder: symbols, rules, the transform and its front ends."""
