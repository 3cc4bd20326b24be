"""Everything that touches thunder: symbols, rules, the transform and its front ends."""

# First: its import registers what is here (`thunder_flce.registration`), so none of it may be half imported then.
import thunder  # noqa: F401
