"""Environments, their registry, rewards and the renderer that turns messages into tokens. Never imports torch."""
