"""Everything that touches thunder: symbols, rules, the transform and its front ends."""

# thunder first: after its import, `thunder_flce.registration` imports `plugin`, and no module here may be half imported
# at that time.
import thunder  # noqa: F401
