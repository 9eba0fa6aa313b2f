"""Decisions only, pure: what lives where, which lane does what, and when to change it."""
