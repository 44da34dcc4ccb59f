"""Offline jobs: compute the KV cache of a corpus and put it in a store."""
