"""The learner: its loop, collate, advantages, corrections, losses, policy, checkpoints and the publisher of weights."""
