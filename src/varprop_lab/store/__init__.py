"""The folder of results: atomic files, finished cells, checkpoints, manifests."""
