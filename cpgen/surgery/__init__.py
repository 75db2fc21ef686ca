"""Turns a plan and upstream's source into edited source: bind, lower to edits, rewrite, check by erasure."""
