"""How a region is run: its plan, as integers, and what that is predicted to take."""
