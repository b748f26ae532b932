"""Ranks, sharding and checkpoints over plain torch.distributed."""
