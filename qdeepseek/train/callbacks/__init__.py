"""Lightning callbacks, one technique a file."""
