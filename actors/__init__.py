"""The actor: its loop, the rollout of one episode, and the samplers."""
