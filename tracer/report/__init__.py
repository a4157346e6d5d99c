"""Pages and pictures that open anywhere, without a network. `page` is the frame; the rest says what stands in it."""
