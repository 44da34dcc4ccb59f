"""The data plane: how chunks get between the caller's memory and the store, in bounded batches."""
