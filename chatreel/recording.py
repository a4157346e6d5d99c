"""`chatreel record` and `compact`: a live line while it runs, a summary when it ends."""
