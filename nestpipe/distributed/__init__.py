"""Process groups, exchanges, rendezvous and failure reports: the only package that calls torch.distributed."""
