"""Writes a plan for a class that has none, from what its forward does with changed inputs. See docs/plans.md."""
