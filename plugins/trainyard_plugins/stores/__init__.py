"""Bundled stores."""
