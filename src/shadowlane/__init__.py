"""Shadowlane: language models that do not fit, on one PC."""
