"""Bundled trackers."""
