"""In which numbers it is computed."""
