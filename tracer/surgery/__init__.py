"""A trace in, another trace out: slices, merges and miniatures, without ever changing what a row says of itself."""
