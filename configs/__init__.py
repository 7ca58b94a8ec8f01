"""Typed configuration of a run: schema, loader, presets, recipes, and the layout of a run folder."""
